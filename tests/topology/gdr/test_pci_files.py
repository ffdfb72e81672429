"""The law of captures: reading what was written gives the tree again."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.topology.gdr.example import ExampleMachine
from gradwire.topology.gdr.pci_files import config_bytes, tree_files
from gradwire.topology.readers.lspci import read_tree as read_lspci_tree
from gradwire.topology.readers.pci import PciTree, path_type
from gradwire.topology.readers.pci_config import decode_bytes
from gradwire.topology.readers.pci_sysfs import read_tree

LSPCI = Path(__file__).resolve().parents[3].parent / "shared" / "fixtures" / "lspci" / "h100-sxm-pex890-lspci-vvv.txt"


def written(tree: PciTree, root: Path) -> PciTree:
    contents, links = tree_files(tree)
    for path, content in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    for path, target in links.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).symlink_to(Path(*[".."] * path.count("/")) / target)
    return read_tree(root)


def test_the_example_comes_back(tmp_path: Path) -> None:
    machine = ExampleMachine(tmp_path / "a")
    assert dict(written(PciTree(machine.functions), tmp_path / "b").functions) == machine.functions


@pytest.mark.skipif(not LSPCI.is_file(), reason=f"no {LSPCI}")
def test_a_real_tree_comes_back(tmp_path: Path) -> None:
    tree = read_lspci_tree(LSPCI.read_text(errors="replace").splitlines(keepends=True))
    again = written(tree, tmp_path)
    ends = [f.bus_id for f in tree.of_class(0x02, 0x03)]
    for one in ends:
        assert [path_type(again, one, other) for other in ends] == [path_type(tree, one, other) for other in ends]
        assert again.functions[one].config == tree.functions[one].config


@settings(deadline=None)
@given(st.binary(min_size=64, max_size=512), st.booleans())
def test_any_configuration_space_keeps_its_facts(noise: bytes, capabilities: bool) -> None:
    space = bytearray(noise)
    if capabilities:
        space[6] |= 0x10
        space[0x34] = 0x40
        if len(space) > 0x41:
            space[0x40:0x42] = b"\x10\x00"
    config = decode_bytes(bytes(space))
    assert decode_bytes(config_bytes(config)).acs_redirect == config.acs_redirect
    assert decode_bytes(config_bytes(config)).relaxed_ordering == config.relaxed_ordering
    assert decode_bytes(config_bytes(config)).max_read_request_nbytes == config.max_read_request_nbytes
