"""The conformance kit passes every registered loss, and finds what is wrong with broken ones."""

from dataclasses import replace

import pytest
import torch

from mppo.algorithm.policy_losses import POLICY_LOSSES, PolicyLossTraits, TokenLosses, policy_loss
from mppo.check_loss.examination import examine, probe
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from mppo.cli.main import main
from mppo.errors import ConfigError

pytestmark = pytest.mark.unit

HERE = "tests.unit.test_check_loss"
KNOBS = {"dro": {"dro_beta": 0.5}}


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_every_registered_loss_passes(name):
    findings = examine(policy_loss(name, KNOBS.get(name)))
    assert len(findings) == 8
    assert [finding for finding in findings if not finding.passed] == []


def good(x):
    return TokenLosses(-x.advantages * x.log_ratio.exp())


def a_mean(x):
    return TokenLosses((-x.advantages * x.log_ratio.exp()).mean())


def a_number(x):
    return -(x.advantages * x.log_probs).sum()


def mean_over_all_positions(x):
    ratio = x.log_ratio.exp()
    return TokenLosses(-x.advantages * ratio / ratio.detach().mean())


def mean_over_the_micro_batch(x):
    centred = x.advantages - x.advantages[x.mask].mean()
    return TokenLosses(-torch.where(x.mask, centred, 0.0) * x.log_ratio.exp())


def neighbour(x):
    """Reads the position before: another token when a trajectory is cut into slices."""
    before = torch.cat([x.log_probs.new_zeros(1), x.log_probs[:-1]]).clamp(-20, 20)
    first = torch.cat([x.mask.new_ones(1), x.segments.ids[1:] != x.segments.ids[:-1]])
    shown = torch.cat([x.mask.new_zeros(1), x.mask[:-1]]) & ~first
    return TokenLosses(-x.advantages * (x.log_probs + torch.where(shown, before, 0.0)))


def undeclared_detach(x):
    return TokenLosses(-x.log_ratio.exp().detach() * x.advantages * x.log_probs)


def without_clamp(x):
    return TokenLosses(-x.advantages * (x.log_probs - x.old_log_probs).exp())


def wrong_sign(x):
    return TokenLosses(x.advantages * x.log_ratio.exp())


def raises(x):
    raise KeyError("nothing here")


def not_finite(x):
    return TokenLosses(x.log_ratio * torch.inf)


@pytest.mark.parametrize(
    ("loss", "failing"),
    [
        (a_mean, "one finite loss per token"),
        (a_number, "one finite loss per token"),
        (raises, "one finite loss per token"),
        (not_finite, "one finite loss per token"),
        (mean_over_all_positions, "the cut into micro-batches does not matter"),
        (mean_over_the_micro_batch, "the cut into micro-batches does not matter"),
        (neighbour, "slices of a trajectory on context-parallel ranks do not matter"),
        (undeclared_detach, "the gradient is that of the loss (finite differences, declared stop-gradients held)"),
        (without_clamp, "loss and gradient are finite at log-ratios of +-1000"),
        (wrong_sign, "on policy, good actions become likelier and bad ones less likely"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_what_is_wrong_is_found(loss, failing):
    findings = {f.check: f for f in examine(policy_loss(f"{HERE}:{loss.__name__}"))}
    assert not findings[failing].passed
    assert findings[failing].detail


def test_what_the_mask_hides_is_found_out():
    findings = {f.check: f for f in examine(policy_loss(f"{HERE}:mean_over_all_positions"))}
    assert not findings["what the mask hides matters to neither loss nor gradient"].passed


def per_rank_choice(x):
    """A `prepare` that forgets the other ranks."""
    return {"best": x.advantages == x.advantages[x.mask].max() if bool(x.mask.any()) else x.mask}


def test_a_prepare_that_looks_at_one_rank_only_is_found():
    def chosen(x):
        return TokenLosses(torch.where(x.prepared["best"], 2.0, 1.0) * -x.advantages * x.log_ratio.exp())

    loss = replace(policy_loss(f"{HERE}:good"), fn=chosen, traits=PolicyLossTraits(prepare=per_rank_choice))
    failed = [finding.check for finding in examine(loss) if not finding.passed]
    assert failed == ["the cut over data-parallel ranks does not matter"]


def test_a_probe_names_the_loss_and_the_trajectory():
    with pytest.raises(ConfigError, match="not_finite' is not finite on ordinary numbers: trajectory 0"):
        probe(policy_loss(f"{HERE}:not_finite"))
    with pytest.raises(ConfigError, match="raises' raised on a small batch: KeyError"):
        probe(policy_loss(f"{HERE}:raises"))


def test_the_command_prints_a_table_draws_a_picture_and_returns_0(tmp_path, capsys):
    picture = tmp_path / "pictures" / "good.png"
    assert main(["check-loss", f"{HERE}:good", "--out", str(picture)]) == 0
    assert "on policy, good actions" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_returns_1_for_a_loss_that_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check-loss", f"{HERE}:wrong_sign"]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert main(["check-loss", f"{HERE}:a_mean"]) == 1
    assert "a mean?" in " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vanila"], "did you mean 'vanilla'"),
        (["vanilla", "clip_rato=0.1"], "did you mean 'clip_ratio'"),
        (["vanilla", "clip_ratio"], "'clip_ratio' is not a knob"),
        (["dro"], "dro_beta is None"),
        (["nowhere.losses:mine"], "cannot be imported"),
    ],
)
def test_what_cannot_be_checked_is_named(arguments, said, capsys):
    assert main(["check-loss", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_picture_shows_the_clip(tmp_path):
    from mppo.check_loss.report import curve

    ratios = torch.tensor([0.5, 1.0, 1.1, 2.0], dtype=torch.double)
    losses, gradients = curve(policy_loss("vanilla"), 1.0, ratios)
    assert losses.tolist() == pytest.approx([-0.5, -1.0, -1.1, -1.2])
    assert gradients.tolist() == pytest.approx([-0.5, -1.0, -1.1, 0.0])


def test_an_error_in_one_part_is_raised_and_leaves_no_other_waiting():
    def fail(part, reduction):
        if part == 1:
            raise ValueError("part 1")
        return reduction.sum(torch.ones(1))

    with pytest.raises(ValueError, match="part 1"):
        on_simulated_ranks([0, 1, 2], fail)


def test_parts_that_reduce_unequally_do_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr("mppo.check_loss.simulated_ranks.PATIENCE", 0.2)
    with pytest.raises(RuntimeError, match="all must, whatever they hold"):
        on_simulated_ranks([0, 1], lambda part, reduction: reduction.sum(torch.ones(1)) if part == 0 else None)
