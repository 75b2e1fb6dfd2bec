//! How a step ends: all came, some did not come in time, or something went wrong.

use super::{Brought, Gather, Phase, RootAction, Stage, ANSWER_TIME, LINGER};
use crate::comm::rendezvous::wire::{self, Failure};
use nccl_plugin_api::NcclResult;
use std::sync::Arc;
use std::time::Instant;

impl Gather {
    pub(super) fn finish_if_all_know(&mut self, now: Instant) {
        let answering = self.links.values().any(|link| matches!(link.stage, Stage::Answering { .. }));
        let over = match &self.phase {
            Phase::Answering { .. } => !answering,
            Phase::Failing { until, .. } => !answering && (self.told.len() == self.brought.len() || now >= *until),
            _ => false,
        };
        if over {
            self.phase = match std::mem::replace(&mut self.phase, Phase::Open) {
                Phase::Answering { outcome, .. } => Phase::Done(outcome),
                Phase::Failing { failure, .. } => Phase::Done(Err(failure)),
                other => other,
            };
        }
    }

    /// The deadline passed here or on another rank.
    pub(super) fn expire(&mut self, now: Instant) {
        let absent: Vec<u32> = (0..).zip(&self.brought).filter(|(_, b)| b.is_none()).map(|(rank, _)| rank).collect();
        let gone: Vec<u32> = self.gave_up.iter().copied().collect();
        let mut sentence = match &gone[..] {
            [] => self.job.did_not_come(&self.name, &absent),
            gone => {
                let mut sentence = format!(
                    "{}: {} gave up after {} s before rank 0 came",
                    self.name,
                    self.job.ranks(gone),
                    self.job.timeout.as_secs_f64()
                );
                if !absent.is_empty() {
                    sentence += &format!("; {} did not come either", self.job.ranks(&absent));
                }
                sentence
            }
        };
        if !self.failed.is_empty() {
            sentence += &format!("; {}", self.job.failures(&self.failed));
        }
        let behind: Vec<u32> = absent.iter().copied().filter(|rank| self.behind.contains(rank)).collect();
        if !behind.is_empty() {
            sentence += &format!("; {} came to an earlier step meanwhile, see the log there", self.job.ranks(&behind));
        }
        self.fail(NcclResult::TIMEOUT, sentence, now);
        if let Phase::Failing { until, .. } = &mut self.phase {
            // The absent had their time: nobody waits for them any longer.
            self.told.extend(absent);
            *until = (*until).max(now + LINGER);
        }
    }

    /// All ranks came.
    pub(super) fn complete(&mut self, now: Instant) {
        if !self.failed.is_empty() {
            return self.fail(
                NcclResult::REMOTE_ERROR,
                format!("{}: {}", self.name, self.job.failures(&self.failed)),
                now,
            );
        }
        if !self.gave_up.is_empty() {
            return self.expire(now);
        }
        let brought: Vec<Brought> = std::mem::take(&mut self.brought).into_iter().flatten().collect();
        self.brought.resize_with(brought.len(), || None);
        let commons = brought.iter().map(|b| &b.bytes[b.common.clone()]);
        let own = |rank: usize| {
            wire::encode_list(brought.iter().map(move |b| &b.bytes[b.addressed + rank * b.slice..][..b.slice]))
        };
        let (common, mine) = (wire::encode_list(commons), own(0));
        if (common.len() + mine.len()) as u64 > wire::MAX_REPLY_BODY {
            let sentence = format!("{}: the ranks brought more than {} bytes", self.name, wire::MAX_REPLY_BODY);
            return self.fail(NcclResult::INVALID_USAGE, sentence, now);
        }
        // Each sender's slices have one length, so every rank's own part has the same: one head serves all.
        let mut shared = wire::gathered_head(self.step, common.len(), mine.len());
        shared.extend_from_slice(&common);
        let shared: Arc<[u8]> = shared.into();
        let until = self.deadline.max(now) + ANSWER_TIME;
        self.phase = Phase::Answering { until, outcome: Ok((shared.clone(), mine)) };
        for (rank, one) in brought.iter().enumerate().skip(1) {
            self.set_stage(one.conn, Stage::Answering { tells: Some(rank as u32) });
            self.actions.push_back(RootAction::Send { conn: one.conn, shared: shared.clone(), own: own(rank) });
        }
    }

    /// Fails the step, unless it is over, and tells all who wait.
    pub(super) fn fail(&mut self, code: NcclResult, sentence: String, now: Instant) {
        if !matches!(self.phase, Phase::Open) {
            return;
        }
        let failure = Failure { code: code.0, sentence };
        let bytes: Arc<[u8]> = wire::encode_failed(self.step, &failure).into();
        self.phase = Phase::Failing { until: now + LINGER, failure };
        let waiting = self.links.iter().filter_map(|(&conn, link)| match link.stage {
            Stage::Waiting { rank, .. } => Some((conn, rank)),
            _ => None,
        });
        for (conn, rank) in waiting.collect::<Vec<_>>() {
            self.answer(conn, bytes.clone(), Some(rank));
        }
        self.told.extend(&self.gave_up);
    }
}
