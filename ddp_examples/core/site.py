"""conf/site/NAME.yaml -> Site: what the launchers must know of a machine. No torch.

Use: `site = load_site("frontera")`. What NAME.yaml leaves out is as in slurm.yaml. Of two files of one name, keys in
the user's own conf folder (DDP_EXAMPLES_CONF) win over the shipped ones.
"""

import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_examples.core.config import ConfigError, first_line, lay_over, nearest
from ddp_examples.core.demos import PACKAGE, DemoFile


@dataclass  # not frozen: OmegaConf would refuse to fill in the values of a queue
class Queue:
    """Limits of a queue (Slurm: partition)."""

    nodes: int  # most of one job; 0: not known
    time: str  # longest of one job, as Slurm writes it; empty: not known
    gpus: int  # of each of its nodes; -1: not known


@dataclass(frozen=True)
class Site:
    """Types of the keys in conf/site/*.yaml; their meanings are in slurm.yaml."""

    start: str
    look: str
    queues: Dict[str, Queue]
    time: str
    gpu_request: str
    sbatch: List[str]
    never: List[str]
    modules: List[str]
    folder: str
    environment: Dict[str, str]
    interface: str
    startup_timeout_s: float
    stop_before_end_s: int
    requeue: bool

    def __post_init__(self) -> None:
        options = [*self.sbatch, *self.gpu_request.split(), *self.start.split()]
        refused = [option for option in options if option.partition("=")[0] in self.never]
        if refused:
            raise ValueError(f"{refused[0]} must not be used at this site (its key `never`)")
        if self.startup_timeout_s < 10:
            raise ValueError(f"startup_timeout_s={self.startup_timeout_s:g}: at least 10 seconds")

    def runs_folder(self) -> Path:
        """Where the logs of the jobs go, absolute. ConfigError where a variable in `folder` has no value."""
        folder = os.path.expandvars(self.folder)
        if "$" in folder:
            raise ConfigError(f"the site's folder is {self.folder}, and that variable is not set here")
        return Path(folder).expanduser().absolute() / "runs"


def load_site(name: str) -> Site:
    """The site `name`; ConfigError names a wrong file or key."""
    beside = DemoFile(PACKAGE / "__main__.py")  # conf folders are looked up from a file of the package
    files = beside.conf_files(f"site/{name}.yaml")
    if not files:
        there = sorted({file.stem for folder in beside.conf_folders for file in (folder / "site").glob("*.yaml")})
        raise ConfigError(f"site={name}: there is no site/{name}.yaml. {nearest(name, there, 'site=')}")
    tree = OmegaConf.structured(Site)
    OmegaConf.set_readonly(tree, False)  # the dataclass is frozen; here its values are gathered
    bases = beside.conf_files("site/slurm.yaml") if name != "slurm" else []
    lay_over(tree, [*files, *bases], prefix="site.")
    try:
        return typing.cast(Site, OmegaConf.to_object(tree))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{files[0]}: {first_line(error)}") from None
