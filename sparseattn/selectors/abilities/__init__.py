"""What a method may do beside `append` and `select`, a file each: a class names it in its bases, and the cache asks.

May use `core` and `kernels`.
"""

from sparseattn.selectors.abilities.biases import Biases
from sparseattn.selectors.abilities.chooses_at_once import ChoosesAtOnce
from sparseattn.selectors.abilities.compares_heads import ComparesHeads
from sparseattn.selectors.abilities.estimates_mass import EstimatesMass
from sparseattn.selectors.abilities.evicts import Evicts
from sparseattn.selectors.abilities.follows_checks import FollowsChecks
from sparseattn.selectors.abilities.follows_layers import FollowsLayers
from sparseattn.selectors.abilities.follows_moves import FollowsMoves
from sparseattn.selectors.abilities.has_tail import HasTail
from sparseattn.selectors.abilities.host_only import HostOnly
from sparseattn.selectors.abilities.learns_from_queries import LearnsFromQueries
from sparseattn.selectors.abilities.looks_ahead import LooksAhead
from sparseattn.selectors.abilities.observes import Observes
from sparseattn.selectors.abilities.ranks_listed import RanksListed
from sparseattn.selectors.abilities.reads_keys import ReadsKeys
from sparseattn.selectors.abilities.reads_rounded_keys import ReadsRoundedKeys
from sparseattn.selectors.abilities.replays_native import ReplaysNative
from sparseattn.selectors.abilities.shares_scores import SharesScores
from sparseattn.selectors.abilities.weighs_unsealed import WeighsUnsealed

__all__ = [
    "Biases",
    "ChoosesAtOnce",
    "ComparesHeads",
    "EstimatesMass",
    "Evicts",
    "FollowsChecks",
    "FollowsLayers",
    "FollowsMoves",
    "HasTail",
    "HostOnly",
    "LearnsFromQueries",
    "LooksAhead",
    "Observes",
    "RanksListed",
    "ReadsKeys",
    "ReadsRoundedKeys",
    "ReplaysNative",
    "SharesScores",
    "WeighsUnsealed",
]
