from ._load import (
    load_model as load_model,
    load_optimizer as load_optimizer,
    load_rules as load_rules,
    preset_names as preset_names,
)
from ._slice import Slice as Slice, order_text as order_text, parse_slice as parse_slice
from ._usage import UsageError as UsageError, calling as calling, in_flags as in_flags, one_line as one_line
