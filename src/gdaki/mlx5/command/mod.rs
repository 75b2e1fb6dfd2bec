//! DevX commands of mlx5 devices: what is asked for, as the bytes of a command, and answers' bytes as what they say.
//!
//! A command is a row of big-endian words of 32 bits. Layouts give fields as (offset, width) in bits, counted from the
//! upper bit of the first word: field `(0x43, 5)` is five bits of the third word, below its upper three. Here are
//! tables of such fields, by layout, and functions without side effects; nothing calls the device.
//!
//! Source of every field, unless its line says otherwise: Linux, `include/linux/mlx5/mlx5_ifc.h`, whose structures
//! `mlx5_ifc_NAME_bits` are in these modules called NAME; what Linux calls reserved, rdma-core's
//! `providers/mlx5/mlx5_ifc.h`. Tests hold these against tables of another origin.

pub mod capabilities;
pub mod completion_queue;
pub mod fields;
pub mod path;
pub mod queue_pair;
pub mod transition;

pub use capabilities::Capabilities;
