"""Tessera's attention beside its peers on one GPU: `python -m tessera.bench --help`."""
