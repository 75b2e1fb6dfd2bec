//! NCCL's variables about RDMA devices.

use super::parse::{integer, unless_minus_one, within};
use super::variables::Variable;
use super::{AddressRange, ReliableDoorbell, RingerChoice};
use std::time::Duration;

/// Those that this library reads too; they mean what they mean in NCCL.
pub(super) const RDMA: &[Variable] = &[
    Variable {
        name: "NCCL_IB_DISABLE",
        default: "0",
        meaning:
            "Whether `OXYGIN_FABRIC=auto` leaves RDMA devices alone, as NCCL does; `verbs` takes them all the same.",
        accepted: "an integer: yes if not 0",
        apply: |config, text| integer(text).map(|value| config.ib_disable = value != 0),
    },
    Variable {
        name: "NCCL_IB_HCA",
        default: "every device with an active port",
        meaning: "RDMA devices and ports to use.",
        accepted: "name prefixes with commas between, each with `:PORT` if wanted; `=` in front: exact names; `^` in \
                   front: all but these",
        apply: |config, text| {
            config.ib_hca = Some(text.to_owned());
            Some(())
        },
    },
    Variable {
        name: "NCCL_IB_DEVICE_PCI_ORDER",
        default: "1",
        meaning:
            "Whether RDMA devices are listed by their PCI addresses, which makes GPUs that share several take them in \
                  the same order on all hosts. 0: in the order of libibverbs.",
        accepted: "an integer: yes if not 0",
        apply: |config, text| integer(text).map(|value| config.ib_pci_order = value != 0),
    },
    Variable {
        name: "NCCL_IB_MERGE_VFS",
        default: "1",
        meaning:
            "Whether NCCL is told that virtual functions are where their card is. 0, for virtual machines whose NICs \
                  are devices of one bus: each is where it is.",
        accepted: "an integer: yes if not 0",
        apply: |config, text| integer(text).map(|value| config.ib_merge_vfs = value != 0),
    },
    Variable {
        name: "NCCL_IB_GID_INDEX",
        default: "-1",
        meaning:
            "GID table index on RoCE. -1: chosen by the three variables that follow, the first in the table among \
                  equals.",
        accepted: "-1 to 255",
        apply: |config, text| unless_minus_one(text, 255).map(|value| config.ib_gid_index = value),
    },
    Variable {
        name: "NCCL_IB_ROUTABLE_FLID_GID_INDEX",
        default: "1",
        meaning:
            "On InfiniBand: the GID to use where its prefix has a routable subnet number (FLID); else it is that of \
                  index 0.",
        accepted: "0 to 255",
        apply: |config, text| within(text, 0, 255).map(|value| config.ib_flid_gid_index = value),
    },
    Variable {
        name: "NCCL_IB_ROCE_VERSION_NUM",
        default: "2",
        meaning: "The version of RoCE that a GID is chosen for; another is taken where the port has no such GID.",
        accepted: "1, 2",
        apply: |config, text| within(text, 1, 2).map(|value| config.ib_roce_version = value),
    },
    Variable {
        name: "NCCL_IB_ADDR_FAMILY",
        default: "AF_INET",
        meaning: "The family of addresses that a GID is chosen from; another is taken where the port has none of it.",
        accepted: "AF_INET, AF_INET6",
        apply: |config, text| {
            config.ib_wants_ipv6 = match text {
                "AF_INET" => false,
                "AF_INET6" => true,
                _ => return None,
            };
            Some(())
        },
    },
    Variable {
        name: "NCCL_IB_ADDR_RANGE",
        default: "any",
        meaning: "The subnet, of the family above, that a GID's address is chosen from, for ports with addresses in \
                  several. A port that has none there is named in the log, and its GID chosen without this.",
        accepted: "ADDRESS/BITS",
        apply: |config, text| {
            config.ib_address_range = Some(AddressRange::parse(text)?);
            Some(())
        },
    },
    Variable {
        name: "NCCL_IB_TC",
        default: "-1",
        meaning: "Traffic class of verbs packets. -1: the communicator's, else 0.",
        accepted: "-1 to 255",
        apply: |config, text| unless_minus_one(text, 255).map(|value| config.ib_tc = value),
    },
    Variable {
        name: "NCCL_GIN_IB_TC",
        default: "-1",
        meaning: "Traffic class for GPU-initiated networking alone. -1: NCCL_IB_TC.",
        accepted: "-1 to 255",
        apply: |config, text| unless_minus_one(text, 255).map(|value| config.ib_tc = value.or(config.ib_tc)),
    },
    Variable {
        name: "NCCL_IB_SL",
        default: "-1",
        meaning: "InfiniBand service level. -1: 0.",
        accepted: "-1 to 15",
        apply: |config, text| unless_minus_one(text, 15).map(|value| config.ib_sl = value),
    },
    Variable {
        name: "NCCL_IB_TIMEOUT",
        default: "20",
        meaning: "How long a queue pair waits for an acknowledgement: 4.096 µs × 2^n; 0 is for ever.",
        accepted: "0 to 31",
        apply: |config, text| within(text, 0, 31).map(|value| config.ib_timeout = value),
    },
    Variable {
        name: "NCCL_IB_RETRY_CNT",
        default: "7",
        meaning: "How often a queue pair sends again before it fails; at most 6 on soft-RoCE, where 7 is for ever.",
        accepted: "0 to 7",
        apply: |config, text| within(text, 0, 7).map(|value| config.ib_retry_cnt = value),
    },
    Variable {
        name: "NCCL_IB_MQP_RETRY_CNT",
        default: "34",
        meaning:
            "How often a queue pair that timed out on its way to its peer, on RoCE for want of an answer to ARP, is \
                  tried again, within half of OXYGIN_TIMEOUT for all of a set of contexts.",
        accepted: "0 to 1000",
        apply: |config, text| within(text, 0, 1000).map(|value| config.ib_modify_retries = value),
    },
    Variable {
        name: "NCCL_IB_MQP_RETRY_ALL",
        default: "0",
        meaning: "Whether a queue pair is tried again that failed on its way to its peer for any other reason, too.",
        accepted: "an integer: yes if not 0",
        apply: |config, text| integer(text).map(|value| config.ib_modify_retry_all = value != 0),
    },
    Variable {
        name: "NCCL_IB_MQP_RETRY_SLEEP_MSEC",
        default: "100",
        meaning: "What is waited before the first of these retries, in ms; before the n-th, n times that.",
        accepted: "0 to 60000",
        apply: |config, text| {
            within(text, 0, 60_000).map(|value| config.ib_modify_pause = Duration::from_millis(value))
        },
    },
    Variable {
        name: "NCCL_IB_ECE_ENABLE",
        default: "1",
        meaning: "Whether queue pairs agree on options of their vendor's (enhanced connection establishment), where \
                  libibverbs and both devices know them.",
        accepted: "an integer: yes if not 0",
        apply: |config, text| integer(text).map(|value| config.ib_ece = value != 0),
    },
    Variable {
        name: "NCCL_IB_PKEY",
        default: "0",
        meaning: "Index into the port's partition key table.",
        accepted: "0 to 65535",
        apply: |config, text| within(text, 0, 65_535).map(|value| config.ib_pkey = value),
    },
    Variable {
        name: "NCCL_IB_PCI_RELAXED_ORDERING",
        default: "2",
        meaning:
            "Whether RDMA devices may write data windows in relaxed order, where libibverbs and they know it; signal \
                  windows never.",
        accepted: "0: no; 1, 2: yes",
        apply: |config, text| within(text, 0, 2).map(|value: u8| config.ib_relaxed_ordering = value != 0),
    },
    Variable {
        name: "NCCL_DMABUF_ENABLE",
        default: "1",
        meaning:
            "Whether GPU memory may be registered with RDMA devices by DMA-BUF. 0: only by address, with a peer memory \
                  module.",
        accepted: "0 or another integer",
        apply: |config, text| integer(text).map(|value| config.dma_buf = value != 0),
    },
    Variable {
        name: "NCCL_IB_DATA_DIRECT",
        default: "1",
        meaning: "With the engine `gdaki`: whether GPU memory is registered with Data Direct where the device has it.",
        accepted: "an integer: on above 0",
        apply: |config, text| integer(text).map(|value| config.ib_data_direct = value > 0),
    },
    Variable {
        name: "NCCL_GDAKI_USE_RELIABLE_DB",
        default: "0",
        meaning:
            "With the engine `gdaki`: whether kernels ring mlx5 devices without a doorbell record. 1: they do, and \
                  devices that need one are refused; 2: they do where the device can do without for queues of \
                  that depth.",
        accepted: "0, 1, 2",
        apply: |config, text| {
            config.reliable_doorbell = match integer(text)? {
                0 => ReliableDoorbell::Off,
                1 => ReliableDoorbell::On,
                2 => ReliableDoorbell::IfPossible,
                _ => return None,
            };
            Some(())
        },
    },
    Variable {
        name: "NCCL_GIN_GDAKI_NIC_HANDLER",
        default: "0",
        meaning: "With the engine `gdaki`: who rings mlx5 devices. 0: kernels where the GPU can, else this process \
                  for them; 1: this process; 2: kernels, and where the GPU cannot the device is refused.",
        accepted: "0, 1, 2",
        apply: |config, text| {
            config.ringer = match integer(text)? {
                0 => RingerChoice::Auto,
                1 => RingerChoice::Process,
                2 => RingerChoice::Kernels,
                _ => return None,
            };
            Some(())
        },
    },
];
