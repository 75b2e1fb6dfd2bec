//! What a completion status means and what to look at, in one place.

use crate::error::Kind;
use oxygin_ffi::verbs::types::*;

/// Meaning and remedy of an `IBV_WC_*` status.
pub fn meaning(status: u32) -> (&'static str, &'static str) {
    match status {
        IBV_WC_RETRY_EXC_ERR => (
            "the peer's device did not answer within the retries",
            "check that the peer is alive, that its port is up and reachable (routes, PFC and ECN, firewall on UDP \
             4791), and that both ends use the same GID type and MTU; NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT set how \
             long it tries",
        ),
        IBV_WC_REM_ACCESS_ERR => (
            "the peer's device refused the remote address or key",
            "the window was deregistered or is smaller at the peer, or the ranks disagree about its layout",
        ),
        IBV_WC_REM_INV_REQ_ERR => (
            "the peer's device found the request malformed",
            "check that both ends run the same oxygin and that the message fits the peer's limits",
        ),
        IBV_WC_REM_OP_ERR => (
            "the peer's device could not carry the operation out",
            "look for a fault of device or memory in the peer's kernel log; if it was a signal in GPU memory, PCIe may \
             not let atomics of that device through to the GPU, and OXYGIN_FABRIC=soft does without them",
        ),
        IBV_WC_RNR_RETRY_EXC_ERR => (
            "the peer had no receive posted for too long",
            "check that the peer is not stopped; its progress thread posts receives",
        ),
        IBV_WC_LOC_PROT_ERR | IBV_WC_LOC_ACCESS_ERR => (
            "the local memory is not registered for this",
            "the source or destination window was deregistered while operations were under way; or, with GPU memory, \
             PCIe does not let the device reach the GPU: switch off ACS on the bridges between them, and the IOMMU's \
             translation",
        ),
        IBV_WC_LOC_LEN_ERR => ("the local length does not fit the device", "report this as a fault of oxygin"),
        IBV_WC_LOC_QP_OP_ERR => ("the local device found the request malformed", "report this as a fault of oxygin"),
        IBV_WC_WR_FLUSH_ERR => (
            "the connection had been broken already, most likely from the peer's side",
            "look for the first error in the peer's log",
        ),
        IBV_WC_REM_ABORT_ERR | IBV_WC_RESP_TIMEOUT_ERR => {
            ("the peer gave the operation up", "look for the first error in the peer's log")
        }
        IBV_WC_FATAL_ERR | IBV_WC_GENERAL_ERR => {
            ("the local device failed", "look for the device in the kernel log; it may need a reset")
        }
        _ => ("the device reports an error", "look the status up in the documentation of libibverbs"),
    }
}

/// What kind of fault it is.
pub fn kind(status: u32) -> Kind {
    match status {
        IBV_WC_REM_ACCESS_ERR => Kind::RemoteAccess,
        IBV_WC_LOC_PROT_ERR | IBV_WC_LOC_ACCESS_ERR => Kind::LocalProtection,
        IBV_WC_REM_INV_REQ_ERR => Kind::Protocol,
        IBV_WC_LOC_LEN_ERR | IBV_WC_LOC_QP_OP_ERR => Kind::Internal,
        IBV_WC_REM_OP_ERR | IBV_WC_FATAL_ERR | IBV_WC_GENERAL_ERR => Kind::DeviceFailed,
        // No answer, or an end of the connection.
        _ => Kind::PeerGone,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_status_has_words() {
        for status in 1..64 {
            let (meaning, remedy) = super::meaning(status);
            assert!(!meaning.is_empty() && !remedy.is_empty(), "{status}");
        }
        // What a GPU behind a bridge that forbids it looks like.
        assert!(super::meaning(super::IBV_WC_LOC_PROT_ERR).1.contains("ACS"));
        assert!(super::meaning(super::IBV_WC_REM_OP_ERR).1.contains("atomics"));
    }
}
