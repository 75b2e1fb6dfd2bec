//! Which peers a rank's device code talks to.

/// Whether rank `own` talks to `peer` where only ranks that differ by a multiple of `stride` do; 0 and 1: all.
pub fn is_reached(own: u32, peer: u32, stride: u32) -> bool {
    stride <= 1 || own % stride == peer % stride
}

#[cfg(test)]
mod tests {
    use super::is_reached;

    #[test]
    fn a_stride_leaves_out_other_rails() {
        let peers = |own, stride| (0..8).filter(|&p| is_reached(own, p, stride)).collect::<Vec<_>>();
        assert_eq!(peers(3, 0), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(peers(3, 1), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(peers(5, 4), [1, 5]);
    }
}
