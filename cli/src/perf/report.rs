//! Tables for people, JSON for programs.

use super::floor::Floor;
use super::samples::{Bandwidth, Latency};
use super::setup::Summary;
use serde_json::{json, Value};

/// What one row holds, for one or two libraries.
pub enum Row {
    /// Latency or completion.
    Latency(Vec<Latency>),
    /// Rate or bandwidth.
    Bandwidth(Vec<Bandwidth>),
}

/// Collects rows, and prints them as they come.
pub struct Report {
    print: bool,
    rows: Vec<Value>,
    title: Value,
}

impl Report {
    /// `print`: tables appear on standard output at once.
    pub fn new(print: bool) -> Self {
        Self { print, rows: Vec::new(), title: Value::Null }
    }

    fn line(&self, text: &str) {
        if self.print {
            use std::io::Write;
            // A closed pipe must not end the rank in the middle of a collective step.
            let _ = writeln!(std::io::stdout(), "{text}");
        }
    }

    /// A line of its own.
    pub fn note(&self, text: &str) {
        self.line(text);
    }

    /// Starts a table. `facts` go into the JSON rows.
    pub fn table(&mut self, title: &str, facts: Value, latency: bool, against: bool, floor: bool) {
        self.title = facts;
        self.line(&"-".repeat(118));
        self.line(&format!(" {title}"));
        self.line(&header(latency, against, floor));
    }

    /// One row.
    pub fn row(&mut self, size: usize, row: &Row, floor: Option<&Floor>) {
        self.line(&match row {
            Row::Latency(l) => latency_row(size, l, floor),
            Row::Bandwidth(b) => bandwidth_row(size, b, floor),
        });
        let mut value = self.title.clone();
        value["bytes"] = json!(size);
        let names = ["result", "against"];
        match row {
            Row::Latency(all) => {
                all.iter().zip(names).for_each(|(l, name)| value[name] = json!(l));
                if let [a, b] = all[..] {
                    value["ratio"] = json!({
                        "typical": over(a.typical, b.typical), "avg": over(a.avg, b.avg), "p99": over(a.p99, b.p99)
                    });
                }
                if let (Some(f), Some(a)) = (floor, all.first()) {
                    value["floor"] = json!(f);
                    value["ratio_to_flag"] = json!(over(a.typical, f.flag_typical));
                }
            }
            Row::Bandwidth(all) => {
                all.iter().zip(names).for_each(|(b, name)| value[name] = json!(b));
                if let [a, b] = all[..] {
                    value["ratio"] = json!({
                        "peak": over(a.peak, b.peak),
                        "average": over(a.average, b.average),
                        "median": over(a.median, b.median)
                    });
                }
                if let (Some(f), Some(a)) = (floor, all.first()) {
                    value["floor"] = json!(f);
                    value["ratio_to_copy"] = json!(f.copy.map(|c| over(a.median, c)));
                    value["ratio_to_memcpy"] = json!(over(a.median, f.memcpy));
                }
            }
        }
        self.rows.push(value);
    }

    /// One line of the set-up table.
    pub fn set_up(&mut self, name: &str, nranks: u32, contexts: u32, s: &Summary) {
        let ms = |seconds: f64| seconds * 1e3;
        let mib = |bytes: f64| bytes / (1u64 << 20) as f64;
        self.line(&format!(
            " {nranks:>6} {contexts:>9} {:>12.2} {:>12.2} {:>12.2} {:>12.2} {:>13.2} {:>10.2} {:>10.2} {:>8} {:>5} \
             {:>14.1}  {name}",
            ms(s.max.connect),
            ms(s.max.create_context),
            ms(s.max.register),
            ms(s.max.total),
            ms(s.max.teardown),
            mib(s.max.memory as f64),
            mib(s.memory_mean),
            s.max.threads,
            s.max.descriptors,
            s.segments_per_rank
        ));
        self.rows.push(json!({"test": "setup", "library": name, "ranks": nranks, "contexts": contexts, "result": s}));
    }

    /// The set-up table's head.
    pub fn set_up_header(&self) {
        self.line(&"-".repeat(118));
        self.line(
            " set-up: connect + createContext + 2 registrations; the slowest rank; memory beyond that before \
             init, windows untouched",
        );
        self.line(" TCP segments with data are those of the whole network namespace during set-up, divided by ranks");
        self.line(&format!(
            " {:>6} {:>9} {:>12} {:>12} {:>12} {:>12} {:>13} {:>10} {:>10} {:>8} {:>5} {:>14}  library",
            "#ranks",
            "#contexts",
            "connect[ms]",
            "context[ms]",
            "register[ms]",
            "total[ms]",
            "teardown[ms]",
            "max[MiB]",
            "mean[MiB]",
            "#threads",
            "#fds",
            "#segments/rank"
        ));
    }

    /// Everything as one object.
    pub fn json(self, head: Value) -> Value {
        let mut head = head;
        head["results"] = Value::Array(self.rows);
        head
    }
}

/// a / b; 0 where b is 0, so that JSON stays valid.
fn over(a: f64, b: f64) -> f64 {
    if b > 0.0 {
        a / b
    } else {
        0.0
    }
}

fn header(latency: bool, against: bool, floor: bool) -> String {
    let mut line = match (latency, against) {
        (true, false) => " #bytes   #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    \
                          t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]"
            .to_owned(),
        (false, false) => " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]".to_owned(),
        (true, true) => " #bytes   #iterations  t_typical[usec]: this      other   ratio  \
                         t_avg[usec]: this      other   ratio    99%[usec]: this      other   ratio"
            .to_owned(),
        (false, true) => " #bytes   #iterations  BW  median[MB/sec]: this      other   ratio  \
                          MsgRate[Mpps]: this      other   ratio"
            .to_owned(),
    };
    if floor {
        line += match latency {
            true => "   flag ping-pong[usec]   ratio",
            false => "   process copy[MB/sec]   ratio   memcpy[MB/sec]   ratio",
        };
    }
    line
}

fn latency_row(size: usize, all: &[Latency], floor: Option<&Floor>) -> String {
    let mut line = match all {
        [a, b] => format!(
            " {size:<8} {:<11} {:>23.2} {:>10.2} {:>7.2} {:>18.2} {:>10.2} {:>7.2} {:>18.2} {:>10.2} {:>7.2}",
            a.iterations,
            a.typical,
            b.typical,
            over(a.typical, b.typical),
            a.avg,
            b.avg,
            over(a.avg, b.avg),
            a.p99,
            b.p99,
            over(a.p99, b.p99)
        ),
        [a, ..] => format!(
            " {size:<8} {:<12} {:>13.2} {:>14.2} {:>16.2} {:>14.2} {:>16.2} {:>22.2} {:>24.2}",
            a.iterations, a.min, a.max, a.typical, a.avg, a.stdev, a.p99, a.p999
        ),
        [] => String::new(),
    };
    if let (Some(f), Some(a)) = (floor, all.first()) {
        line += &format!(" {:>22.3} {:>7.2}", f.flag_typical, over(a.typical, f.flag_typical));
    }
    line
}

fn bandwidth_row(size: usize, all: &[Bandwidth], floor: Option<&Floor>) -> String {
    let mut line = match all {
        [a, b] => format!(
            " {size:<8} {:<11} {:>26.2} {:>10.2} {:>7.2} {:>20.4} {:>10.4} {:>7.2}",
            a.iterations,
            a.median,
            b.median,
            over(a.median, b.median),
            a.median_mpps,
            b.median_mpps,
            over(a.median_mpps, b.median_mpps)
        ),
        [a, ..] => format!(" {size:<10} {:<12} {:>17.2} {:>21.2} {:>15.6}", a.iterations, a.peak, a.average, a.mpps),
        [] => String::new(),
    };
    if let (Some(f), Some(a)) = (floor, all.first()) {
        line += &match f.copy {
            Some(copy) => format!(" {copy:>22.2} {:>7.2}", over(a.median, copy)),
            None => format!(" {:>22} {:>7}", "forbidden", "-"),
        };
        line += &format!(" {:>16.2} {:>7.2}", f.memcpy, over(a.median, f.memcpy));
    }
    line
}
