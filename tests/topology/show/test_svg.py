from xml.etree import ElementTree

from gradwire.topology.graph import Machine
from gradwire.topology.labels import Labels
from gradwire.topology.show.svg import FAR, GDR, svg
from gradwire.topology.show.svg_layout import layout


def test_the_picture_names_every_device_once_and_draws_a_curve_per_pair(preset: Machine) -> None:
    text = svg(preset)
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    labels = Labels(preset)
    assert all(words.count(labels.gpu(gpu)) == 1 for gpu in preset.gpus)
    assert all(words.count(nic.ports[0].name) == 1 for nic in preset.nics)
    pairs = sum(labels.distances.qualifies_for_gdr(gpu, nic) for gpu in preset.gpus for nic in preset.nics)
    curves = [element.get("stroke") for element in root.iter("{http://www.w3.org/2000/svg}path")]
    assert curves.count(GDR) == pairs
    assert curves.count(FAR) == sum(
        not any(labels.distances.qualifies_for_gdr(gpu, nic) for nic in preset.nics) for gpu in preset.gpus
    )


def test_nothing_in_the_picture_overlaps_or_leaves_it(preset: Machine) -> None:
    plan = layout(Labels(preset))
    boxes = list(plan.boxes.values())
    for i, a in enumerate(boxes):
        assert a.x >= 0
        assert a.x + a.width <= plan.width
        for b in boxes[i + 1 :]:
            apart = a.x + a.width <= b.x or b.x + b.width <= a.x or a.bottom <= b.y or b.bottom <= a.y
            assert apart, (a, b)
