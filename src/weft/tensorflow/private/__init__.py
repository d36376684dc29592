"""Every name of TensorFlow and Keras that is not public, and that weft uses: those of TensorFlow 2.21, Keras 3.15.

Elsewhere these are written as ``private.call``, say.
"""

from weft.tensorflow.private.functions import call as call
from weft.tensorflow.private.functions import call_in_graph as call_in_graph
from weft.tensorflow.private.functions import context_exists as context_exists
from weft.tensorflow.private.functions import keep_from_xla as keep_from_xla
from weft.tensorflow.private.functions import library_of as library_of
from weft.tensorflow.private.functions import traced_for_xla as traced_for_xla
from weft.tensorflow.private.functions import wants_xla as wants_xla
from weft.tensorflow.private.functions import watch_functions as watch_functions
from weft.tensorflow.private.functions import with_autograph as with_autograph
from weft.tensorflow.private.functions import xla_hindrance as xla_hindrance
from weft.tensorflow.private.gradients import watch_asked as watch_asked
from weft.tensorflow.private.gradients import watch_gradients as watch_gradients
from weft.tensorflow.private.graphs import captures as captures
from weft.tensorflow.private.graphs import is_building_function as is_building_function
from weft.tensorflow.private.graphs import is_stateful as is_stateful
from weft.tensorflow.private.graphs import is_symbolic as is_symbolic
from weft.tensorflow.private.graphs import made as made
from weft.tensorflow.private.graphs import number_of as number_of
from weft.tensorflow.private.graphs import operations_of as operations_of
from weft.tensorflow.private.graphs import placeholder as placeholder
from weft.tensorflow.private.graphs import present_graph as present_graph
from weft.tensorflow.private.graphs import step_graph as step_graph
from weft.tensorflow.private.graphs import tracing_a_step as tracing_a_step
from weft.tensorflow.private.graphs import type_of as type_of
from weft.tensorflow.private.graphs import writes as writes
from weft.tensorflow.private.models import begin_fit as begin_fit
from weft.tensorflow.private.models import build_optimizer as build_optimizer
from weft.tensorflow.private.models import in_symbolic_scope as in_symbolic_scope
from weft.tensorflow.private.models import is_of_keras_two as is_of_keras_two
from weft.tensorflow.private.models import keras_two_model as keras_two_model
from weft.tensorflow.private.models import layer_classes as layer_classes
from weft.tensorflow.private.models import loss_scale_classes as loss_scale_classes
from weft.tensorflow.private.models import loss_tracker as loss_tracker
from weft.tensorflow.private.models import optimizer_classes as optimizer_classes
from weft.tensorflow.private.models import optimizer_reads as optimizer_reads
from weft.tensorflow.private.models import set_untracked as set_untracked
from weft.tensorflow.private.models import trained_by as trained_by
from weft.tensorflow.private.models import watch_epochs as watch_epochs
from weft.tensorflow.private.models import watch_layers as watch_layers
from weft.tensorflow.private.random_states import eager_seeds as eager_seeds
from weft.tensorflow.private.random_states import make_shared_state as make_shared_state
from weft.tensorflow.private.random_states import shared_states as shared_states
from weft.tensorflow.private.recording import watch_iterators as watch_iterators
from weft.tensorflow.private.recording import watch_updates as watch_updates
from weft.tensorflow.private.variables import free as free
from weft.tensorflow.private.variables import handle_of as handle_of
from weft.tensorflow.private.variables import handles_made as handles_made
from weft.tensorflow.private.variables import key_of as key_of
from weft.tensorflow.private.variables import underlying as underlying
from weft.tensorflow.private.variables import uninitialised as uninitialised
from weft.tensorflow.private.variables import variables_wait as variables_wait
from weft.tensorflow.private.variables import waiting as waiting
from weft.tensorflow.private.variables import waits as waits
