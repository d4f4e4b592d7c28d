from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from _in_store import PLACES, InStore
from _servers import (
    ACCESS_KEY,
    SECRET_KEY,
    Proxy,
    Server,
    gcs_server,
    proxied,
    s3_server,
)
from jax.sharding import Mesh


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    """All devices along one axis."""
    return Mesh(np.array(jax.devices()), ("x",))


@pytest.fixture(scope="session")
def _credentials() -> Iterator[pytest.MonkeyPatch]:
    """What TensorStore reads from the environment, once per process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patched.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patched.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patched.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        yield patched


@pytest.fixture(scope="session")
def s3(_credentials: pytest.MonkeyPatch) -> Iterator[Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def gcs(_credentials: pytest.MonkeyPatch) -> Iterator[Server]:
    with gcs_server() as server:
        _credentials.setenv("TENSORSTORE_GCS_HTTP_URL", server.endpoint)
        yield server


@pytest.fixture(scope="session")
def _proxied(s3: Server) -> Iterator[tuple[Server, Proxy]]:
    with proxied(s3) as pair:
        yield pair


@pytest.fixture
def behind_proxy(_proxied: tuple[Server, Proxy]) -> Iterator[tuple[Server, Proxy]]:
    """The S3 server behind a proxy that does nothing yet."""
    yield _proxied
    _proxied[1].clear()


@pytest.fixture(params=["s3", "gcs"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)


# The modules whose tests are about bytes, and are run on each place.
_OF_BYTES = {
    "test_checkpoint_hostile",
    "test_checkpoint_index",
    "test_checkpoint_load",
    "test_checkpoint_maps",
    "test_checkpoint_names",
    "test_checkpoint_save",
    "test_checkpoint_states",
    "test_checkpoint_stores",
    "test_foreign_files",
    "test_manager",
    "test_many_arrays",
}
# The tests of these modules that run on a disk alone, by the reason.
_ON_DISK: dict[str, tuple[str, ...]] = {
    "It looks at the files that a save writes to a disk, which are others in a store.": (
        "test_a_damaged_key_of_numbers_is_said",
        "test_a_directory_is_never_replaced",
        "test_a_file_carries_its_plan_and_is_replaced_at_once",
        "test_a_large_tree_is_spread_over_files",
        "test_a_sharding_that_no_plan_made",
        "test_a_stack_of_many_is_loaded_and_saved_back",
        "test_an_exported_checkpoint_is_a_plain_one_of_its_own_layout",
        "test_constants_are_loaded_cast_and_saved",
        "test_keys_come_back_as_keys",
        "test_other_libraries_read_a_saved_module",
        "test_steps_are_kept_while_training_donates",
        "test_steps_are_whole_numbers_of_any_kind",
        "test_the_arrays_of_a_file_fit_into_its_bytes",
        "test_what_killed_saves_left_is_found_and_removed",
    ),
    "It counts, cuts or delays system calls. `test_objects_read` counts requests.": (
        "test_a_file_that_changes_after_its_header_was_read",
        "test_a_quarter_of_the_devices_reads_a_quarter",
        "test_each_process_reads_only_what_its_shards_are_made_of",
        "test_gaps_are_read_along_or_skipped_as_asked",
        "test_no_more_than_the_limit_is_on_its_way",
        "test_reading_headers_reads_no_weights",
        "test_reads_that_return_less_are_continued",
        "test_replicas_are_read_once_and_share_their_memory",
        "test_small_arrays_are_written_by_replica_zero_alone",
        "test_small_tensors_are_read_together",
        "test_training_goes_on_while_a_step_is_written",
    ),
    "It is about links, pipes, space or swapped directories, which stores lack.": (
        "test_a_disk_that_fills_while_it_is_written_is_named",
        "test_a_file_that_is_no_file_does_not_hang",
        "test_a_full_disk_changes_nothing",
        "test_a_link_put_there_after_the_check_is_not_followed",
        "test_a_pipe_is_not_waited_for",
        "test_a_reader_beside_a_writer_gets_one_state_whole",
        "test_links_are_followed_inside_the_directory_alone",
        "test_links_out_of_a_store_are_not_followed",
        "test_of_two_writers_the_second_gets_an_error",
        "test_too_little_space_is_noticed_before_anything_is_written",
        "test_whoever_is_killed_leaves_the_old_checkpoint_whole",
    ),
    "A header does not tell the size of an object, so that `load` finds the error.": (
        "test_a_short_file_names_the_first_array_not_whole",
        "test_a_truncated_file",
        "test_headers_are_read_as_by_the_library_of_the_format",
    ),
    "The message of a store has an address, or another fix.": (
        "test_addresses_of_other_machines_are_told_from_paths",
        "test_an_index_prints_as_a_short_table",
        "test_an_index_that_is_wrong_about_its_files",
        "test_nothing_there",
    ),
    "It loads in a process of its own, whose memory is bounded.": (
        "test_a_chunk_that_no_memory_holds_ends_no_process",
        "test_a_chunk_that_unpacks_to_more_than_it_is_takes_no_memory",
        "test_nothing_outside_is_opened_for_orbax",
    ),
    "It reads what another library wrote, if that is there.": (
        "test_an_eformer_checkpoint_that_eformer_wrote",
    ),
    "It reads no checkpoint.": (
        "test_a_cast_may_drop_an_imaginary_part",
        "test_a_complex_number_may_round_an_integer",
        "test_a_header_as_a_table_is_as_parsed",
        "test_a_header_is_the_json_of_its_members",
        "test_sizes_are_grouped_as_items_are",
        "test_the_import_needs_no_store_library",
        "test_the_page_lists_every_format",
    ),
    "It loads a hundred times. `test_objects_bytes` draws eight examples on each store.": (
        "test_any_shape_any_spec_any_transpose_and_any_dtype",
        "test_files_of_flax_that_are_damaged_anywhere",
        "test_floats_become_the_same_integers_everywhere",
        "test_loading_with_a_map_is_loading_and_then_mapping",
        "test_no_integer_changes_its_value",
    ),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if Path(metafunc.definition.path).stem not in _OF_BYTES:
        return
    if not any(metafunc.function.__name__ in names for names in _ON_DISK.values()):
        metafunc.parametrize("kept_in", PLACES, indirect=True)


@pytest.fixture(autouse=True)
def kept_in(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Where a test keeps its checkpoints: on the disk, or in a store."""
    place = getattr(request, "param", "local")
    if place == "local":
        yield
        return
    stand_in = InStore(request.getfixturevalue(place))
    monkeypatch.setattr(request.module, "checkpoint", stand_in)
    yield
    assert stand_in.is_used, "the test reaches no store; run it on a disk alone"
