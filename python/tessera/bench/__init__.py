"""Tessera's attention against its peers on one GPU: `python -m tessera.bench --help`."""
