"""The commands of `mppo`: every bad input ends in one line that says what to change."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from mppo.cli.compose import load_config
from mppo.cli.moved_names import moved
from mppo.errors import ConfigError, MppoError


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = _parser().parse_args(arguments)
    if os.getcwd() not in sys.path:  # so that import paths in the configuration may name the user's own packages
        sys.path.insert(0, os.getcwd())
    try:
        return options.run(options)
    except MppoError as error:
        if _speaks_for_others(error):
            print(f"mppo: {error.told()}", file=sys.stderr, flush=True)
        return 2


def _speaks_for_others(error: MppoError) -> bool:
    """Whether this process is the one that says an error which others have too."""
    if error.on_every_rank:
        return _is_first("RANK")
    return not error.on_every_rank_of_machine or _is_first("LOCAL_RANK")


def _is_first(variable: str) -> bool:
    """Among the processes that torchrun has started."""
    return os.environ.get(variable, "0") == "0"


class _Parser(argparse.ArgumentParser):
    """Whose messages are said once, and tell what is an option elsewhere and a field here."""

    def error(self, message: str) -> NoReturn:
        options = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
        told = [f"; {option}: {here}" for option in options if (here := moved(option.removeprefix("--")))]
        super().error(message + "".join(told))

    def _print_message(self, message: str, file: Any = None) -> None:
        if _is_first("RANK"):
            super()._print_message(message, file)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("mppo", description="PPO for language models inside Megatron-core's schedules.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train (under torchrun)")
    train.set_defaults(run=_train)
    sft = commands.add_parser("sft", help="train on given answers (under torchrun)")
    sft.set_defaults(run=_sft)
    plan = commands.add_parser("plan", help="say what a configuration does, without launching anything")
    _add_plan_options(plan)
    plan.set_defaults(run=_plan)
    check_loss = commands.add_parser("check-loss", help="examine a policy loss, registered or by import path")
    check_loss.add_argument("loss", metavar="NAME_OR_PATH", help="vanilla, my_package.losses:my_loss")
    check_loss.add_argument("knobs", nargs="*", help="knobs of the loss: clip_ratio=0.1")
    check_loss.add_argument("--out", help="where to draw loss and gradient against the ratio (default: NAME.png)")
    check_loss.set_defaults(run=_check_loss)
    mismatch = commands.add_parser("mismatch", help="say why trainer and engine score the same tokens otherwise")
    _add_mismatch_options(mismatch)
    mismatch.set_defaults(run=_mismatch)
    show = commands.add_parser("config", help="every field of the configuration: type, default, documentation")
    show.add_argument("filters", nargs="*", metavar="FILTER", help="words or patterns: lr, actor.optim.*, 'clip*'")
    show.add_argument("--json", action="store_true", help="print the fields as JSON")
    show.set_defaults(run=_config)
    for command in (train, sft, plan):
        command.add_argument("--config-name", default="train", help="a file in the configuration folder")
        command.add_argument("--config-dir", help="the configuration folder (default: mppo's own configs/)")
        command.add_argument("overrides", nargs="*", help="fields to set: actor.optim.lr=1e-5")
    return parser


def _add_plan_options(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--world-size", type=int, help="processes of the run (default: one replica)")
    plan.add_argument("--prompt-tokens", type=int, help="length for the estimate (default: the maximum)")
    plan.add_argument("--response-tokens", type=int, help="mean length for the estimate (default: the maximum)")
    plan.add_argument("--response-sigma", type=float, help="log-normal spread of responses (default: 0, all alike)")
    plan.add_argument("--lengths", metavar="FILE", help='instead: JSON lines {"prompt": 123, "response": 456}')
    plan.add_argument("--control-plane", metavar="RANKS", help="simulate planning on so many ranks: 8,64,512,4096")
    plan.add_argument("--nic-gbit", type=float, help="of one GPU's network card, for SGLang refits (default: 400)")
    plan.add_argument("--nvlink-gbyte", type=float, help="GB/s of one GPU within a machine (default: 450)")
    plan.add_argument("--gpus-per-machine", type=int, help="of trainer and servers (default: 8)")


def _add_mismatch_options(mismatch: argparse.ArgumentParser) -> None:
    mismatch.add_argument(
        "target", metavar="RUN_OR_CONFIG", help="the folder of a run, or a file of the configurations"
    )
    mismatch.add_argument("overrides", nargs="*", help="fields to set: rollout.sglang.urls=[http://127.0.0.1:30000]")
    mismatch.add_argument("--config-dir", help="the configuration folder (default: mppo's own configs/)")
    mismatch.add_argument("--prompts", type=int, default=16, help="prompts that are answered (default: 16)")
    mismatch.add_argument("--no-refit", action="store_true", help="leave the servers the weights that they hold")
    mismatch.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")


def _check_loss(options: argparse.Namespace) -> int:
    from mppo.check_loss.report import check_loss

    return check_loss(options.loss, options.knobs, options.out, Console())


def _config(options: argparse.Namespace) -> int:
    from mppo.cli.config_fields import print_fields

    return print_fields(options.filters, options.json)


def _plan(options: argparse.Namespace) -> int:
    from mppo.cli.plan import plan

    return plan(options)


def _train(options: argparse.Namespace) -> int:
    from mppo.cli.start_table import print_start_table
    from mppo.megatron import topology
    from mppo.planning.run_plan import make_plan, print_plan
    from mppo.trainer.alarm import Alarm
    from mppo.trainer.assemble import assemble
    from mppo.trainer.launcher import end_with_launcher
    from mppo.trainer.trainer import Trainer

    end_with_launcher()
    run = assemble(load_config(options.config_name, options.overrides, options.config_dir))
    if run.topology.rank == 0:
        console = Console()
        print_plan(make_plan(run.spec, int(os.environ["WORLD_SIZE"])), console)
        print_start_table(run.roles.actor.chunks, console)
        console.print(run.data, highlight=False)
    trainer = Trainer(run)
    alarm = Alarm(trainer.guard.rescue)
    try:
        trainer.train()
    except Exception as error:
        if not (isinstance(error, MppoError) and error.on_every_rank):
            alarm.sound(error)
        raise
    finally:
        alarm.off()
        run.records.reporter.close()
        run.rollouts.collector.close()
    topology.shutdown()
    return 0


def _mismatch(options: argparse.Namespace) -> int:
    from mppo.megatron import topology
    from mppo.mismatch.mismatch_report import mismatch
    from mppo.mismatch.opening import stand_alone
    from mppo.trainer.launcher import end_with_launcher

    end_with_launcher()
    stand_alone()
    folder = Path(options.target)
    run = folder if (folder / "config.yaml").is_file() else None
    if run is None and folder.is_dir() and os.sep in options.target:
        error = ConfigError(f"{folder} has no config.yaml: give the folder of a run, or the name of a configuration")
        error.on_every_rank = True
        raise error
    if run is None:
        config = load_config(options.target, options.overrides, options.config_dir)
    else:
        config = load_config("config", options.overrides, str(folder))
    status = mismatch(config, run, options.prompts, refit=not options.no_refit, json_file=options.json)
    topology.shutdown()
    return status


def _sft(options: argparse.Namespace) -> int:
    from mppo.cli.start_table import print_start_table
    from mppo.megatron import topology
    from mppo.trainer.launcher import end_with_launcher
    from mppo.trainer.sft import SupervisedTrainer

    end_with_launcher()
    trainer = SupervisedTrainer(load_config(options.config_name, options.overrides, options.config_dir))
    if trainer.topology.rank == 0:
        print_start_table(trainer.actor.chunks, Console())
    trainer.train()
    topology.shutdown()
    return 0
