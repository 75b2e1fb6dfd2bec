//! Statistics as JSON.

use super::text::{state, way};
use oxygin::telemetry::stats::read::{Histogram, Lane, Set};
use serde_json::{json, Value};

/// All of them: `{"sets": [...]}`. Times are in nanoseconds; bucket i of a histogram counts times of 2^i to 2^(i+1).
pub fn object(sets: &[Set]) -> Value {
    json!({ "sets": sets.iter().map(set).collect::<Vec<_>>() })
}

fn set(s: &Set) -> Value {
    json!({
        "pid": s.pid,
        "communicator": s.comm,
        "communicator_id": s.comm_id,
        "set": s.set,
        "rank": s.rank,
        "nranks": s.nranks,
        "contexts": s.contexts,
        "threads": s.threads,
        "fabric": s.fabric,
        "way": way(s.way),
        "age_ns": s.age,
        "published_ns_ago": s.published,
        "stall_ns": s.stall,
        "lanes": s.lanes.iter().map(lane).collect::<Vec<_>>(),
    })
}

fn lane(l: &Lane) -> Value {
    json!({
        "context": l.context,
        "peer": l.peer,
        "companion": l.is_companion,
        "entries": l.entries,
        "bytes": l.bytes,
        "batches": l.batches,
        "completed": l.completed,
        "refused": l.refused,
        "dropped": l.dropped,
        "under_way": l.under_way,
        "oldest_ns": l.oldest,
        "state": state(l.state),
        "seen_to_posted": histogram(&l.posted),
        "posted_to_complete": histogram(&l.complete),
    })
}

fn histogram(h: &Histogram) -> Value {
    json!({
        "count": h.count(),
        "sum_ns": h.sum,
        "p50_ns_below": h.quantile(0.5),
        "p99_ns_below": h.quantile(0.99),
        "buckets": &h.buckets[..],
    })
}
