/* NCCL's tables as facts say they are: field order and argument types written down by hand, independently of the
 * Rust types, for tests/layout.rs to compare with the header that cbindgen makes from those. 64-bit Linux. */
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef void (*f_log)(int, unsigned long, const char *, int, const char *, ...);
typedef struct { int ndevs, devs[4]; } f_vprops4;
typedef struct { int ndevs, devs[8]; } f_vprops8;

#define PROPERTIES(vprops)                                                                                             \
    char *name, *pci_path;                                                                                             \
    uint64_t guid;                                                                                                     \
    int ptr_support, reg_is_global, force_flush, speed, port;                                                          \
    float latency;                                                                                                     \
    int max_comms, max_recvs, net_device_type, net_device_version;                                                     \
    vprops v_props;                                                                                                    \
    size_t max_p2p_bytes, max_coll_bytes;                                                                              \
    int max_multi_request_size;
typedef struct { PROPERTIES(f_vprops4) } f_props11;
typedef struct { PROPERTIES(f_vprops8) int16_t rail_id, plane_id; } f_props12;
typedef struct { int net_device_type, net_device_version; void *handle; size_t size; int needs_proxy_progress; } f_dev;

typedef struct { int32_t nranks; uint32_t queue_size; uint64_t queues, pis, cis, counters, signals; } f_context1;
typedef struct { f_context1 v1; uint64_t signal_offsets, last_issued_get, last_visible_get; } f_context2;
typedef struct { f_context2 v2; bool flushes_all_puts_on_any_signal; } f_context3;

typedef struct { int n_signals, n_counters, n_contexts, queue_depth, traffic_class; } f_gin13_config;
typedef struct {
    int n_signals, n_counters, n_contexts, queue_depth, traffic_class, backend_version, rank_stride;
} f_gin14_config;
typedef struct { bool supports_strong_signals, supports_va_signals; } f_gin14_props;
typedef struct { int n_contexts, traffic_class, rank_stride; } f_rma14_config;
typedef struct { bool flushes_all_puts_on_any_signal; } f_rma16_props;

/* Runs of arguments and fields that several versions share. */
#define TRANSFER uint64_t, void *, size_t, uint64_t, void *, uint32_t
#define SIGNAL uint64_t, void *, uint64_t, uint32_t
#define START(properties_fields)                                                                                       \
    const char *name;                                                                                                  \
    int (*init)(void **, uint64_t, f_log);                                                                             \
    int (*devices)(int *);                                                                                             \
    properties_fields                                                                                                  \
    int (*listen)(void *, int, void *, void **);
#define CONNECT int (*connect)(void *, void **, int, int, void *, void **);
#define GIN_REGISTER                                                                                                   \
    int (*reg_mr_sym)(void *, void *, size_t, int, uint64_t, void **, void **);                                        \
    int (*reg_mr_sym_dma_buf)(void *, void *, size_t, int, uint64_t, int, uint64_t, void **, void **);
#define RMA_REGISTER                                                                                                   \
    int (*reg_mr_sym)(void *, void *, size_t, int, uint64_t, void **);                                                 \
    int (*reg_mr_sym_dma_buf)(void *, void *, size_t, int, uint64_t, int, uint64_t, void **);
#define CLOSE                                                                                                          \
    int (*dereg_mr_sym)(void *, void *);                                                                               \
    int (*destroy_context)(void *);                                                                                    \
    int (*close_coll)(void *);                                                                                         \
    int (*close_listen)(void *);
#define FLUSH_AND_TEST                                                                                                 \
    int (*iflush)(void *, int, void *, uint32_t, void **);                                                             \
    int (*test)(void *, void *, int *);
#define END                                                                                                            \
    int (*query_last_error)(void *, bool *);                                                                           \
    int (*finalize)(void *);
#define PROPS11 int (*get_properties)(int, f_props11 *);
#define PROPS12 int (*get_properties)(int, f_props12 *);

typedef struct {
    START(PROPS11) CONNECT
    int (*create_context)(void *, int, int, void **, f_dev **);
    GIN_REGISTER CLOSE
    int (*iput)(void *, TRANSFER, void **);
    int (*iput_signal)(void *, TRANSFER, SIGNAL, void **);
    int (*test)(void *, void *, int *);
    int (*gin_progress)(void *);
    END
} f_gin11;

typedef struct {
    START(PROPS11)
    int (*connect)(void *, void **, int, int, int, int, void *, void **);
    int (*create_context)(void *, int, int, int, void **, f_dev **);
    GIN_REGISTER CLOSE
    int (*iput)(void *, TRANSFER, int, void **);
    int (*iput_signal)(void *, TRANSFER, SIGNAL, int, void **);
    int (*test)(void *, void *, int *);
    int (*gin_progress)(void *);
    END
} f_gin12;

/* Also RMA v13. */
typedef struct {
    START(PROPS12) CONNECT
    int (*create_context)(void *, f_gin13_config *, void **, f_dev **);
    GIN_REGISTER CLOSE
    int (*iput)(void *, int, TRANSFER, void **);
    int (*iput_signal)(void *, int, TRANSFER, SIGNAL, void **);
    int (*iget)(void *, int, TRANSFER, void **);
    FLUSH_AND_TEST
    int (*gin_progress)(void *);
    END
} f_gin13;

typedef struct {
    START(int (*get_gin_properties)(f_gin14_props *); PROPS12) CONNECT
    int (*create_context)(void *, f_gin14_config *, void **, f_dev **);
    GIN_REGISTER CLOSE
    int (*gin_progress)(void *);
    END
} f_gin14;

typedef struct {
    START(PROPS12) CONNECT
    int (*create_context)(void *, f_rma14_config *, void **);
    RMA_REGISTER CLOSE
    int (*iput)(void *, int, TRANSFER, void **);
    int (*iput_signal)(void *, int, TRANSFER, SIGNAL, bool, void **);
    int (*iget)(void *, int, TRANSFER, void **);
    FLUSH_AND_TEST
    int (*rma_progress)(void *);
    END
} f_rma14;

#define OPERATIONS15                                                                                                   \
    int (*iput)(void *, int, TRANSFER, uint32_t, void **);                                                             \
    int (*iput_signal)(void *, int, TRANSFER, SIGNAL, bool, uint32_t, void **);                                        \
    int (*iget)(void *, int, TRANSFER, uint32_t, void **);
typedef struct {
    START(PROPS12) CONNECT
    int (*create_context)(void *, f_rma14_config *, void **);
    RMA_REGISTER CLOSE OPERATIONS15 FLUSH_AND_TEST
    int (*rma_progress)(void *);
    END
} f_rma15;

typedef struct {
    START(int (*get_rma_properties)(void *, f_rma16_props *); PROPS12) CONNECT
    int (*create_context)(void *, f_rma14_config *, void **);
    RMA_REGISTER CLOSE OPERATIONS15 FLUSH_AND_TEST
    int (*rma_progress)(void *);
    END
} f_rma16;
