"""Laws of loads that draw their examples, in stores. The other tests that are about bytes
run on each place themselves.
"""

import hypothesis as hyp
import hypothesis.strategies as st
import pytest
import test_checkpoint_load as loads
import test_checkpoint_maps as maps
from _in_store import InStore


_EXAMPLES = 8
LAWS = [
    loads.test_any_shape_any_spec_any_transpose_and_any_dtype,
    maps.test_loading_with_a_map_is_loading_and_then_mapping,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws_of_loads_hold_in_a_store(law, server, monkeypatch, tmp_path_factory):
    stand_in = InStore(server)
    for module in (loads, maps):
        monkeypatch.setattr(module, "checkpoint", stand_in)
    holds = hyp.given(data=st.data())(law.hypothesis.inner_test)
    hyp.settings(max_examples=_EXAMPLES, deadline=None)(holds)(tmp_path_factory)
