"""The tests of loads and saves that are about bytes, on stores: the same functions, with
each path in the place of which there is an address.
"""

import inspect
import itertools as it
import os

import hypothesis as hyp
import hypothesis.strategies as st
import pytest
import test_checkpoint_hostile as hostile
import test_checkpoint_load as loads
import test_checkpoint_maps as maps
import test_checkpoint_names as names
import test_checkpoint_save as saves
import test_checkpoint_states as states
import test_checkpoint_stores as stores
import test_foreign_files as foreign
import test_many_arrays as many

from shardfx import checkpoint


_NUMBERS = it.count()
_EXAMPLES = 8
MODULES = (hostile, loads, maps, names, saves, states, stores, foreign, many)


class InStore:
    """`shardfx.checkpoint` with the files below a path in a store. What a test wrote to
    the path is copied there before it is read.
    """

    def __init__(self, server):
        self._server = server
        self._places = {}

    def _place(self, path):
        """The address of a path, where its files are by now."""
        if not isinstance(path, str | os.PathLike):
            return path
        prefix = self._places.get(os.fspath(path))
        if prefix is None:
            prefix = f"bytes/{next(_NUMBERS)}"
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    prefix = f"{prefix}/{os.path.basename(path)}"
                    self._server.put(prefix, file.read())
            else:
                self._server.put_directory(prefix, path)
        return self._server.place(prefix)

    def load(self, path, *arguments, **options):
        return checkpoint.load(self._place(path), *arguments, **options)

    def read_index(self, path, **options):
        return checkpoint.read_index(self._place(path), **options)

    def saved_plan(self, path):
        return checkpoint.saved_plan(self._place(path))

    def save(self, path, *arguments, **options):
        number = next(_NUMBERS)
        prefix = f"bytes/{number}/{os.path.basename(path)}"
        checkpoint.save(self._server.place(prefix), *arguments, **options)
        # Only what is there as a whole is read from there.
        self._places[os.fspath(path)] = prefix

    def __getattr__(self, name):
        return getattr(checkpoint, name)


@pytest.fixture(params=["s3", "gcs"])
def in_store(request, monkeypatch):
    stand_in = InStore(request.getfixturevalue(request.param))
    for module in MODULES:
        monkeypatch.setattr(module, "checkpoint", stand_in)


# Without those that look at or change files of a disk, those about its links, pipes,
# descriptors, pages and free space, and one that damages a file 240 times.
TESTS = [
    foreign.test_an_unreadable_array_blocks_no_other,
    foreign.test_bytes_of_packed_tensors_by_choice,
    foreign.test_half_of_t5x_is_an_error,
    hostile.test_a_chunk_may_be_larger_than_a_small_array,
    loads.test_a_live_model_comes_back_with_its_static_leaves,
    loads.test_nothing_is_cast_that_was_not_asked_for,
    loads.test_a_boolean_that_is_neither,
    loads.test_donating_one_replica_leaves_the_others,
    many.test_many_small_arrays_keep_their_bytes,
    maps.test_all_that_is_wrong_is_said_before_anything_is_read,
    maps.test_blocks_of_fp8_are_scaled_on_the_way,
    maps.test_elements_that_alternate_are_taken_apart_in_memory,
    maps.test_a_map_casts_to_what_a_file_can_hold,
    maps.test_keys_are_stacked_whole,
    maps.test_a_number_that_is_needed_several_times_in_a_leaf,
    names.test_an_eformer_index_that_names_an_array_without_metadata,
    names.test_two_orbax_arrays_of_one_name,
    saves.test_any_layout_is_read_under_any_other,
    states.test_a_bool_is_0_or_1_in_the_file,
    states.test_a_branch_may_have_the_name_of_the_metadata,
    states.test_a_counter_that_became_an_array_comes_back,
    states.test_a_number_that_the_checkpoint_lacks,
    states.test_a_part_and_its_whole_name_join,
    states.test_a_step_of_another_library,
    states.test_a_text_is_not_lost_without_a_word,
    states.test_keys_are_planned_from_a_checkpoint_and_loaded,
    states.test_keys_become_neither_other_keys_nor_integers,
    states.test_numbers_go_through_maps,
    stores.test_a_step_of_orbax_names_its_items,
    stores.test_shapes_that_an_index_does_not_say,
]


@pytest.mark.usefixtures("in_store")
@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.__name__)
def test_bytes_are_those_of_a_local_checkpoint(test, mesh, tmp_path):
    arguments = {"mesh": mesh, "tmp_path": tmp_path}
    test(**{name: arguments[name] for name in inspect.signature(test).parameters})


LAWS = [
    loads.test_any_shape_any_spec_any_transpose_and_any_dtype,
    maps.test_loading_with_a_map_is_loading_and_then_mapping,
]


@pytest.mark.usefixtures("in_store")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws_of_loads_hold_in_a_store(law, tmp_path_factory):
    holds = hyp.given(data=st.data())(law.hypothesis.inner_test)
    hyp.settings(max_examples=_EXAMPLES, deadline=None)(holds)(tmp_path_factory)
