//! Runs of descriptors that are like the one before them but for their offsets, which the kernel does not take apart,
//! among others, in looks that are full.

use super::queue::{any_increment, Data, Entry, Queue, Signal, Window};
use super::refused::{behind, run_until_refused};
use super::*;
use nccl_plugin_api::descriptor::{Descriptor, OP_INLINE, OP_PUT, OP_SIGNAL_ADD, OP_SIGNAL_INC, OP_VA_SIGNAL};

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Put,
    Value,
    SignalByWindow,
}

/// What entries have in common.
#[derive(Clone, Copy)]
pub struct Model {
    kind: Kind,
    size: u64,
    /// Of the windows that there are, by number.
    from: u64,
    to: u64,
    version: u8,
    /// The signal: bits of the operation, none without one; number, 0 is for all; value.
    op: u16,
    id: u32,
    value: u64,
    strong: bool,
    /// Of a value, and of the offset that nobody looks at.
    high: u64,
}

impl Queue {
    fn any_model(&mut self, random: &mut Random) -> Model {
        let kind =
            [Kind::Put, Kind::Put, Kind::Put, Kind::Put, Kind::Value, Kind::SignalByWindow][random.below(6) as usize];
        let (op, id, value) = self.any_run(random);
        let mut model = Model {
            kind,
            size: self.any_size(random),
            from: random.below(4),
            to: random.below(4),
            version: self.version(random),
            op,
            id,
            value,
            strong: random.below(2) == 0,
            high: random.next(),
        };
        if kind == Kind::Value {
            model.size = 1 << random.below(4);
        }
        model
    }

    fn any_size(&self, random: &mut Random) -> u64 {
        match random.below(9) {
            0 | 1 => 0,
            8 => [4, 8][random.below(2) as usize],
            2..5 => 4 * (1 + random.below(16)),
            5 | 6 => 16 * (1 + random.below(12)),
            _ => 4 + 4 * random.below(self.most / 8),
        }
    }

    /// A signal for many: all add the same to it, or it is for all, or it is named in vain.
    fn any_run(&mut self, random: &mut Random) -> (u16, u32, u64) {
        let (op, value, _) = any_increment(random);
        match random.below(4) {
            0 => (0, 3, value),
            1 => (op, 0, value),
            _ => self.own_signal().map_or((op, 0, value), |id| (op, id, value >> 24 | 1)),
        }
    }

    /// The same but for one thing.
    fn other_model(&mut self, mut model: Model, random: &mut Random) -> Model {
        match random.below(9) {
            0 if model.kind == Kind::Put && model.size > 0 => model.size = 0,
            0 | 1 if model.kind == Kind::Put => model.size = self.any_size(random),
            2 => model.from = random.below(4),
            3 => model.to = random.below(4),
            4 => (model.op, model.id, model.value) = self.any_run(random),
            5 => model.id = self.own_signal().filter(|_| model.value < 1 << 40).unwrap_or(0),
            // The same signal, another value, or another operation, which none of its own may have.
            6 if model.id == 0 => model.value = (model.value ^ 1 << random.below(48)).max(1),
            7 if model.id == 0 => model.op = [0, OP_SIGNAL_ADD, OP_SIGNAL_INC][random.below(3) as usize],
            7 => model.op = 0,
            _ => return self.any_model(random),
        }
        model
    }

    /// Windows have the handles of another queue's, and descriptors its form.
    fn resemble(&mut self, other: &Queue, random: &mut Random) {
        (self.form, self.stride, self.newest, self.most) = (other.form, other.stride, other.newest, other.most);
        for i in 0..4 {
            let own = self.windows[i].take();
            self.windows[i] = other.windows[i].map(|w| {
                let mut own = own.unwrap_or_else(|| Window::new(self.number, i as u64, random));
                (own.handle, own.is_turned) = (w.handle, w.is_turned);
                own
            });
        }
    }

    fn resembles(&self, other: &Queue) -> bool {
        let handles = |q: &Queue| q.windows.map(|w| w.map(|w| w.handle));
        handles(self) == handles(other)
    }

    /// The next entries are like another queue's, which this one resembles.
    fn follow(&mut self, mut model: Model) {
        let has = |m: &Model| (m.id, m.value, m.op) == (model.id, model.value, model.op);
        if model.op != 0 && model.id != 0 && !self.models.iter().any(has) {
            match u64::from(model.id) {
                id if id >= self.next_signal && model.id < self.signals => self.next_signal = id + 1,
                _ => model.id = 0,
            }
        }
        self.models.insert(0, model);
        self.models.truncate(3);
    }

    /// Mostly like the one before.
    pub fn alike_entry(&mut self, random: &mut Random) -> Entry {
        if self.pair.is_some() {
            return self.any_send(random);
        }
        if random.below(12) == 0 {
            return self.any_entry(random);
        }
        if self.models.is_empty() {
            let model = self.any_model(random);
            self.models.push(model);
        }
        match random.below(16) {
            0 | 1 => {
                let model = self.other_model(self.models[0], random);
                self.models.insert(0, model);
                self.models.truncate(3);
            }
            2 => {
                let n = random.below(self.models.len() as u64) as usize;
                self.models.swap(0, n);
            }
            _ => {}
        }
        self.entry_like(self.models[0], random).unwrap_or_else(|| self.any_entry(random))
    }

    /// Its windows that are not for reads alone.
    fn there(&self) -> Vec<usize> {
        (0..4).filter(|&i| self.windows[i].is_some_and(|w| !w.is_turned)).collect()
    }

    fn entry_like(&mut self, m: Model, random: &mut Random) -> Option<Entry> {
        let there = self.there();
        let of = |n: u64| there[n as usize % there.len()];
        let from = self.windows[of(m.from)].expect("a window");
        let (op, id, increment) = (m.op, m.id, if m.op == OP_SIGNAL_INC { 1 } else { m.value });
        let run = |q: &mut Self| {
            let at = q.signal_at(id.into());
            let nth = q.runs.entry(id).or_insert(0);
            *nth += u64::from(id != 0);
            Signal { at, increment, is_shared: id == 0, nth: nth.saturating_sub(1) }
        };
        let unit = [16, 8, 4][random.below(3) as usize];
        match m.kind {
            Kind::SignalByWindow => {
                let to = self.windows[of(m.to)].as_mut().expect("a window");
                let offset = to.room(8, 8, random)?;
                if op == 0 {
                    return None;
                }
                let d = Descriptor::new(self.form, m.version, OP_VA_SIGNAL | op, m.size);
                let d = d.first(offset, to.handle).second(random.next() >> 1, m.high >> 1);
                let d = d.with_signal(0xff_ffff, m.value, m.strong);
                let signal = Some(Signal { at: to.peer + offset, increment, is_shared: false, nth: 0 });
                Some(Entry::new(d.words, None, signal))
            }
            Kind::Value => {
                let to = self.windows[of(m.to)].as_mut().expect("a window");
                let offset = to.room(m.size, m.size, random)?;
                let (to, handle) = (to.peer + offset, to.handle);
                let value = (random.next() & 0xffff_ffff_ffff | m.high << 48) | 0x0101_0101_0101_0101;
                let d = Descriptor::new(self.form, m.version, OP_PUT | OP_INLINE | op, m.size);
                let d = d.value(value).second(offset, handle).with_signal(id, m.value, m.strong);
                let data = Some(Data::Value { value, to, bytes: m.size });
                let signal = (op != 0).then(|| run(self));
                Some(Entry::new(d.words, data, signal))
            }
            Kind::Put => {
                if m.size == 0 && op == 0 {
                    return None;
                }
                let to = self.windows[of(m.to)].as_mut().expect("a window");
                let d = Descriptor::new(self.form, m.version, OP_PUT | op, m.size);
                let d = d.with_signal(id, m.value, m.strong);
                let (d, data) = if m.size == 0 {
                    // Nobody looks at it.
                    (d.first(random.next() >> 1, from.handle).second(random.next() >> 1, to.handle), None)
                } else {
                    let offset = to.room(m.size, unit, random)?;
                    let first = from.here.next_multiple_of(unit);
                    let units = (from.here + from.here_bytes - m.size - first) / unit;
                    let at = first + unit * [random.below(units + 1), units][random.below(2) as usize];
                    let data = Data::Copy { from: at, to: to.peer + offset, bytes: m.size };
                    (d.first(at - from.here, from.handle).second(offset, to.handle), Some(data))
                };
                let signal = (op != 0).then(|| run(self));
                Some(Entry::new(d.words, data, signal))
            }
        }
    }
}

/// One warp with a queue at each of its places; all may resemble each other.
pub fn full(slots: Slots, ptx: &str, seed: u64) -> Bench {
    let spread = seed % 4;
    let mut bench = Bench::of(slots, ptx, seed, spread, 1 << spread);
    let mut all: Vec<Queue> = bench.queues.iter_mut().filter_map(Option::take).collect();
    let (one, others) = all.split_first_mut().expect("a queue");
    if slots == Slots::Descriptors && bench.below(4) > 0 {
        others.iter_mut().for_each(|q| q.resemble(one, &mut bench.gpu.random));
    }
    let first = (bench.below(8) << spread) as usize;
    let span = 8 >> spread;
    for (i, mut q) in all.into_iter().enumerate() {
        // Ends of windows are reached soon then.
        for w in q.windows.iter_mut().flatten().filter(|_| bench.below(2) == 0) {
            w.use_half();
        }
        q.slots = [span, 2 * span, 16, 32][bench.below(4) as usize];
        bench.queues[first + i] = Some(q);
    }
    bench.empty_queues();
    bench
}

/// So many each by itself, of all queues in turn, where there is room.
pub fn post_each(bench: &mut Bench, most: u64, turns: u64) {
    let places: Vec<usize> = bench.places().into_iter().filter(|&p| bench.queue(p).refused.is_none()).collect();
    let is_one = places.iter().all(|&p| bench.queue(p).resembles(bench.queue(places[0])));
    for _ in 0..most {
        let mut before = None;
        for &place in &places {
            if bench.room(place) > 0 {
                let follows = is_one && bench.below(8) == 0;
                let q = bench.queues[place].as_mut().expect("a queue");
                before.filter(|_| follows).into_iter().for_each(|model| q.follow(model));
                let entry = q.alike_entry(&mut bench.gpu.random);
                before = q.models.first().copied();
                bench.post(vec![(place, entry)], turns);
            }
        }
    }
}

/// As many as there is room for, or fewer; or for two looks that are full, some time apart.
fn post_alike(bench: &mut Bench) {
    let most = [4, 32][bench.below(2) as usize];
    let turns = 1 + bench.below(2);
    if bench.below(2) == 0 {
        return post_each(bench, most, turns);
    }
    bench.run_until(|b| b.places().into_iter().all(|p| b.queue(p).refused.is_some() || b.left_of(p) == 0));
    let is_first = bench.places()[0] < 1 << bench.spread;
    for _ in 0..3 {
        post_each(bench, 8 >> bench.spread, 1);
        // Else it finds that full only by chance.
        if bench.below(2) == 0 {
            bench.gpu.stand();
        }
        let some = bench.below(if is_first { 200 } else { 1600 });
        bench.run(some);
    }
}

pub fn serve_alike(ptx: &str, seed: u64) {
    serve_full(Slots::Descriptors, ptx, seed);
}

/// Looks that are full.
pub fn serve_full(slots: Slots, ptx: &str, seed: u64) {
    let mut bench = full(slots, ptx, seed);
    bench.launch(NEVER, NEVER);
    if bench.below(2) == 0 {
        post_each(&mut bench, 16, 1);
    }
    bench.go();
    for _ in 0..16 {
        post_alike(&mut bench);
        let n = bench.below(3);
        for _ in 0..n * n * 20 {
            bench.run(5);
            bench.check();
        }
    }
    bench.run_until(|b| b.left() == 0);
    bench.finish();
}

/// Queues of one slot a look, one after the other: what comes next in a queue is like what came last in the one before.
pub fn serve_followed(ptx: &str, seed: u64) {
    let mut bench = full(Slots::Descriptors, ptx, 4 * seed + 3);
    bench.launch(NEVER, NEVER);
    bench.go();
    let places = bench.places();
    for round in 0..24 {
        let place = places[round % places.len()];
        let before = bench.queue(places[(round + places.len() - 1) % places.len()]);
        let model = before.models.first().copied().filter(|_| before.resembles(bench.queue(place)));
        let q = bench.queues[place].as_mut().expect("a queue");
        // What came last in its own queue is another.
        let model = model.filter(|_| round % 2 == 1).unwrap_or_else(|| q.any_model(&mut bench.gpu.random));
        q.follow(model);
        let entry = q.entry_like(q.models[0], &mut bench.gpu.random);
        let entry = entry.unwrap_or_else(|| q.any_entry(&mut bench.gpu.random));
        bench.post(vec![(place, entry)], 1);
        bench.run_until(|b| b.left() == 0);
    }
    bench.finish();
}

#[test]
fn those_that_are_alike_are_served() {
    (0..16).for_each(|seed| serve_alike(PTX, seed));
    (0..4).for_each(|seed| serve_followed(PTX, seed));
}

/// One of a run, in the middle of looks that are full, has an offset that is not for the kernel.
pub fn serve_alike_refused(ptx: &str, seed: u64) {
    let mut bench = full(Slots::Descriptors, ptx, seed);
    let place = bench.any_place();
    bench.launch(NEVER, NEVER);
    bench.go();
    post_alike(&mut bench);
    bench.run_until(|b| b.left() == 0);
    let random = &mut bench.gpu.random;
    let q = bench.queues[place].as_mut().expect("a queue");
    let slots = q.slots as usize;
    // With a signal of its own, where there is room.
    let mut any_run = || {
        let m = q.any_model(random);
        let fits = m.kind == Kind::Put && (4..=64).contains(&m.size) && (m.op == 0 || m.id != 0);
        let run: Vec<Entry> = (0..slots).filter(|_| fits).filter_map(|_| q.entry_like(m, random)).collect();
        (!run.is_empty()).then_some((m, run))
    };
    let Some((model, mut run)) = (0..200).find_map(|_| any_run()) else { return };
    let there = q.there();
    let window = |n: u64| q.windows[there[n as usize % there.len()]].expect("a window");
    let (from, to) = (window(model.from), window(model.to));
    let at = random.below(run.len() as u64) as usize;
    let (word, offset) = match random.below(8) {
        0 | 6 => (1, behind(from.here, from.here_bytes, model.size, 4)),
        1 | 7 => (3, behind(to.peer, to.peer_bytes, model.size, 4)),
        2 => (1, (run[at].words[1] >> 1) + 2),
        3 => (3, (run[at].words[3] >> 1) + 1),
        4 => (1, run[at].words[1] >> 1 | 1 << (32 + random.below(31))),
        _ => (3, run[at].words[3] >> 1 | 1 << (32 + random.below(31))),
    };
    run[at].words[word] = offset << 1 | 1;
    // Of the one that is refused nothing may be there.
    run[at].data = None;
    run[at].signal = None;
    run[at + 1..].iter_mut().for_each(|e| e.signal = e.signal.map(|s| Signal { nth: s.nth - 1, ..s }));
    let begin = bench.queue(place).entries.len();
    let turns = 1 + bench.below(3);
    for entry in run {
        bench.post(vec![(place, entry)], turns);
        if bench.below(4) == 0 {
            let others: Vec<usize> = bench.places().into_iter().filter(|&p| p != place).collect();
            for other in others.into_iter().filter(|&p| bench.room(p) > 0).collect::<Vec<_>>() {
                let q = bench.queues[other].as_mut().expect("a queue");
                let entry = q.alike_entry(&mut bench.gpu.random);
                bench.post(vec![(other, entry)], turns);
            }
        }
    }
    run_until_refused(&mut bench, place, begin + at, "one of those that are alike");
    let rest = bench.queue(place).entries.len() - begin - at;
    bench.run_until(|b| b.left() == rest);
    if bench.spread > 0 {
        post_alike(&mut bench);
        bench.run_until(|b| b.left() == rest);
    }
    bench.finish();
}

#[test]
fn one_of_those_that_are_alike_is_refused() {
    (0..16).for_each(|seed| serve_alike_refused(PTX, seed));
}
