"""The layouts: how many GPUs and ranks, what the environment says, which NCCL and which programs."""
import dataclasses

# Kernels of all ranks must fit on the GPU at once, or a collective waits for blocks that cannot start: fewer blocks each.
MULTI = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "16"}
# The streams of all ranks of a process must not share hardware queues, or a rank's kernel can lie behind another's that waits
# for it.
SHARED = {**MULTI, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
# All streams of the application share one hardware queue, which stands while a kernel spins and another is behind it.
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
TCP = {"OXYGIN_SOFT_TRANSPORT": "tcp"}
VERBS = {"OXYGIN_FABRIC": "verbs"}
# What the comparison of all-to-alls needs on both sides: the loopback interface, and NCCL left with its sockets.
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo"}
SOCKETS = {**LOOPBACK, "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}


@dataclasses.dataclass(frozen=True)
class Layout:
    gpus: int
    ranks: int
    what: str
    arguments: tuple = ()
    environment: dict = dataclasses.field(default_factory=dict)
    first: tuple = (2, 29)  # NCCL
    only: tuple = ()  # programs; empty: every one that belongs to no layout of its own
    plugin: bool = True
    core: bool = False  # among the first to run for every NCCL
    solo: bool = False  # its processes take turns on one GPU (without MPS): no other job there
    nic: bool = False  # on RDMA devices that tests/fake-verbs plays, which exist in one process
    rma: bool = True  # with NCCL_RMA_PLUGIN, where this NCCL knows it


PROCESSES, HOSTS = ("--processes",), ("--host-size", "1")
# A selection of programs whose kernels use GIN.
OF_KERNELS = ("alltoall", "barrier", "contexts", "counters", "flood", "gdaki_only", "get", "moe_ll", "pingpong", "signals", "values")
LAYOUTS = {
    "4gpu-threads": Layout(4, 4, "four ranks in one process, a GPU each"),
    "4gpu-processes": Layout(4, 4, "four processes, a GPU each", PROCESSES, core=True),
    "4gpu-2hosts": Layout(4, 4, "four processes, a GPU each, two hosts for NCCL, copies through TCP", ("--host-size", "2"), TCP,
                          core=True),
    "4gpu-hosts": Layout(4, 4, "four processes, a GPU each, four hosts for NCCL, copies through TCP", HOSTS, TCP),
    "4gpu-hosts-mapped": Layout(4, 4, "four processes, a GPU each, four hosts for NCCL, copies from GPU to GPU", HOSTS),
    "2gpu-threads": Layout(2, 2, "two ranks in one process, a GPU each", core=True),
    "2gpu-processes": Layout(2, 2, "two processes, a GPU each", PROCESSES, core=True),
    "2gpu-1queue": Layout(2, 2, "two processes, a GPU each, all streams of a process in one hardware queue", PROCESSES, ONE_QUEUE,
                          core=True),
    "2gpu-hosts": Layout(2, 2, "two processes, a GPU each, two hosts for NCCL, copies through TCP", HOSTS, TCP, core=True),
    "2gpu-hosts-mapped": Layout(2, 2, "two processes, a GPU each, two hosts for NCCL, copies from GPU to GPU", HOSTS),
    "2gpu-gin-alone": Layout(2, 2, "as 2gpu-hosts-mapped, with NCCL_GIN_PLUGIN alone", HOSTS, first=(2, 30), only=OF_KERNELS, rma=False),
    "2gpu-type-3": Layout(2, 2, "as 2gpu-hosts-mapped, with NCCL_GIN_TYPE=3", HOSTS, {"NCCL_GIN_TYPE": "3"}, (2, 30), only=OF_KERNELS),
    "1gpu-2threads": Layout(1, 2, "two ranks in one process on one GPU", (), SHARED, (2, 30), core=True),
    "1gpu-4threads": Layout(1, 4, "four ranks in one process on one GPU", (), SHARED, (2, 30), core=True),
    "1gpu-2threads-tcp": Layout(1, 2, "two ranks in one process on one GPU, copies through TCP", (), {**SHARED, **TCP}, (2, 30)),
    "1gpu-2processes": Layout(1, 2, "two processes on one GPU", PROCESSES, MULTI, (2, 30), solo=True),
    "1gpu-2hosts": Layout(1, 2, "two processes on one GPU, two hosts for NCCL, copies through TCP", HOSTS, {**MULTI, **TCP},
                          (2, 30), solo=True),
    "1gpu-2hosts-mapped": Layout(1, 2, "two processes on one GPU, two hosts for NCCL, copies from GPU to GPU", HOSTS, MULTI,
                                 (2, 30), solo=True),
    "2gpu-fake-nic": Layout(2, 2, "two ranks in one process, a GPU each, on RDMA devices that tests/fake-verbs plays", (), VERBS, nic=True),
    "1gpu-fake-nic": Layout(1, 2, "two ranks in one process on one GPU, on RDMA devices that tests/fake-verbs plays", (),
                            {**SHARED, **VERBS}, (2, 30), nic=True),
    "2gpu-loopback": Layout(2, 2, "as 2gpu-hosts, all-to-all over the loopback interface", HOSTS, {**TCP, **LOOPBACK},
                            only=("alltoall_large",)),
    "2gpu-sockets": Layout(2, 2, "as 2gpu-loopback, by NCCL's own socket transport, no plugin", HOSTS, SOCKETS,
                           only=("nccl_alltoall",), plugin=False),
    "4gpu-sockets": Layout(4, 4, "as 4gpu-hosts, by NCCL's own socket transport, no plugin", HOSTS, SOCKETS, only=("nccl_alltoall",),
                           plugin=False),
    "2gpu": Layout(2, 1, "no NCCL, two GPUs", only=("limits", "locks"), plugin=False),
    "1gpu": Layout(1, 1, "no NCCL, one GPU", only=("hardware_queues", "limits", "locks", "queue_places"), plugin=False),
}
TWO_RANKS_ONLY = {"pingpong", "crowded"}
# Load the plugin, connect nothing.
NO_FABRIC = {"collectives", "torch"}
# Calls of the host: no kernel asks for an engine, and ranks of one host need no fabric.
HOST_CALLS = {"host_put", "zero_cta"}
FIRST_WITH_HOST_CALLS = (2, 30, 7)
# NCCL's own kernels: by GIN between hosts, by loads and stores within one.
ONLY_BETWEEN_HOSTS = HOST_CALLS | {"symmetric"}
# crowded fills a GPU. NCCL's own collectives between ranks of one GPU wait for each other for ever now and then, without any
# plugin at work: a connection is made (memory is allocated) while the other rank's kernel already spins.
OWN_GPU_ONLY = {"collectives", "crowded", "symmetric"}
# They use no NCCL: their log says nothing of a plugin.
NO_NCCL = {"hardware_queues", "limits", "locks", "queue_places"}
# Engines that give device code queues of the library's own, and the programs that only those of GDAKI take.
OWN_QUEUES = ("own", "gdaki-soft", "gdaki")
GDAKI_ONLY = {"gdaki_only"}
# Scripts for Python (`with_python.py`), which start a process a rank, and the layouts for them.
OF_PROCESSES = tuple(name for name, one in LAYOUTS.items() if one.plugin and not one.only and one.arguments and one.environment is not ONE_QUEUE)
ONLY_IN = {"torch": ("2gpu-processes", "4gpu-processes"), "nccl4py": OF_PROCESSES}
SCRIPTS = tuple(ONLY_IN)

# Measured first, one after another on an otherwise idle machine, without --quick: (layout, programs).
FIGURES = [
    ("2gpu", ["limits"]),
    ("2gpu-threads", ["pingpong", "flood", "alltoall"]),
    ("2gpu-processes", ["pingpong", "flood"]),
    ("1gpu", ["limits"]),
    ("1gpu-2threads", ["pingpong", "flood", "alltoall"]),
    ("2gpu-sockets", ["nccl_alltoall"]),
    ("2gpu-loopback", ["alltoall_large"]),
    ("2gpu-hosts", ["pingpong", "flood", "alltoall"]),
    ("2gpu-hosts-mapped", ["alltoall", "flood_ht"]),
    ("4gpu-sockets", ["nccl_alltoall"]),
    ("4gpu-hosts", ["alltoall"]),
    ("4gpu-hosts-mapped", ["alltoall", "flood_ht"]),
]
# What --variant repeats.
VARIANTS = [("2gpu-threads", ["pingpong", "flood"]), ("1gpu-2threads", ["pingpong"])]


def has_fabric(layout, program):
    """Whether this program connects one in this layout, for certain."""
    return program not in NO_FABRIC and (program not in ONLY_BETWEEN_HOSTS or "--host-size" in LAYOUTS[layout].arguments)


def takes(layout, program, version, engine="auto"):
    """Whether this program runs in this layout with this NCCL and this engine."""
    one = LAYOUTS[layout]
    if program in GDAKI_ONLY and not engine.startswith("gdaki"):
        return False
    # These say nothing about an engine.
    if engine != "auto" and (not one.plugin or program == "torch"):
        return False
    # NCCL has its proxy drive the RMA table, which is of type 2 for it.
    if engine == "nccl" and (not one.rma or "NCCL_GIN_TYPE" in one.environment):
        return False
    if version[:2] < one.first or program in TWO_RANKS_ONLY and one.ranks != 2:
        return False
    if program in OWN_GPU_ONLY and one.ranks > one.gpus:
        return False
    # Older ones take calls of the host between hosts from no plugin.
    if program in HOST_CALLS and version < FIRST_WITH_HOST_CALLS and has_fabric(layout, program):
        return False
    if program in ONLY_IN:
        return layout in ONLY_IN[program]
    if one.only:
        return program in one.only
    return not any(program in other.only for other in LAYOUTS.values() if other.only is not OF_KERNELS)
