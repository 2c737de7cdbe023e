"""What scripts/break_kernels.py breaks: one change to one kernel each, and the checks that must catch it."""

from .attention import ATTENTION, BACKWARD, FORWARD, PEERS, SM90_BACKWARD, SM90_DETERMINISTIC, WIDE_BACKWARD
from .mutation import Mutation
from .products import MLP_NLL, NARROW, PRODUCTS

MUTATIONS = ATTENTION + PRODUCTS
