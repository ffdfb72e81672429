import torch

from gradwire.bench.train.model import ByteTransformer, loss_in_nats


def test_it_has_about_half_a_million_parameters() -> None:
    assert 450_000 < sum(parameter.numel() for parameter in ByteTransformer().parameters()) < 550_000


def test_a_position_sees_only_those_before_it() -> None:
    model = ByteTransformer(context=12, width=16, layers=2, heads=2)
    inputs = torch.arange(12)[None]
    changed = inputs.clone()
    changed[0, 7] = 200
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_a_seed_gives_one_model_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, other = ByteTransformer(seed=1), ByteTransformer(seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_every_parameter_gets_a_gradient_and_the_loss_falls() -> None:
    model = ByteTransformer(context=16, width=32, layers=1, heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    windows = torch.arange(17).repeat(4, 1)
    losses = []
    for _ in range(20):
        loss = loss_in_nats(model, windows[:, :-1], windows[:, 1:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
