"""Readers: what a system reports about itself -> `Machine` of graph.py, one module for each format.

A reader has a function `read`. What it cannot read is left out: None is unknown, and `Machine.notes` says why; only a
text or folder of another kind raises a TopologyError. Texts are read by smi.py, lspci.py, nccl_xml.py and hwloc.py
(`read(text) -> Machine`), a folder by sysfs.py (`read(root) -> Machine`). nvml.py asks the driver, and returns an
`NvmlReading`: parts of a Machine, which detect.py completes, because NVML knows neither CPUs nor NICs.

A new reader is a module here (or in a folder of its own: this one has the 20 files that tests/test_layers.py allows),
and a branch in the module that chooses it:

- A text that people paste, `gradwire topo --from FILE`: `_is_known` and `_machine_of_known` of files.py (for XML
  `_machine_of_xml`), its errors and the help of `--from` in gradwire/cli/topo.py; it leaves `OTHER_TOOLS` of kinds.py.
- A source on the running host: `detect_machine` of detect.py asks it, behind a cheap test that it is there, and passes
  what it says to `merge` of merge.py: the first description takes precedence, the second fills its gaps.

A fact that no field holds yet is a field of graph.py, with None or () for unknown; `merge` takes such a field over by
itself. It never takes over `unclassified`, nor NICs that only the second description has, which a note names.
gdr-check and the doctor read more of a host than a topology: topology/gdr/inputs/ and bench/doctor/local.py.

The other modules read nothing by themselves: forest.py, pci.py and pci_config.py make a tree of PCI functions,
pci_sysfs.py, sysfs_ports.py and small_files.py are parts of sysfs.py, nvml_calls.py of nvml.py, xml_tree.py of the
readers of XML, affinity.py is a notation, and kinds.py recognizes a text.
"""
