//! The verbs fabric: reliable connections on RDMA devices, through libibverbs.
