//! Requests that were sent and are neither answered nor lost yet.

use std::collections::VecDeque;

/// Request that was sent, as far as its results need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SentRequest {
    /// Time at which the request was due (CLOCK_MONOTONIC, ns).
    pub due_ns: u64,
    pub class: u8,
}

#[derive(Debug)]
struct Entry {
    sent: SentRequest,
    /// Bitmap of the parts of the response that have been received.
    received_parts: u128,
    is_answered: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerMatch {
    /// The answer completes the response to this request.
    Complete(SentRequest),
    /// The answer is a part of a response that is not complete yet.
    Partial,
    /// The answer repeats a part or response that was received before.
    Duplicate,
    /// The answer belongs to a request that has already timed out.
    Late,
    /// The answer has an id that no request had, or an impossible part.
    Unknown,
}

/// Requests that were sent and have not timed out, by their ids, which count up from 0 and wrap.
#[derive(Debug, Default)]
pub struct Outstanding {
    /// Requests in the order of their ids, in which they were sent.
    entries: VecDeque<Entry>,
    first_id: u32,
    /// Number of requests that were ever added.
    sent_count: u64,
    unanswered_count: usize,
}

const PARTS_MAX: u8 = 128;

impl Outstanding {
    /// Adds a request, and returns the id under which it must be sent.
    pub fn add(&mut self, sent: SentRequest) -> u32 {
        let id = self.first_id.wrapping_add(self.entries.len() as u32);
        self.entries.push_back(Entry { sent, received_parts: 0, is_answered: false });
        self.sent_count += 1;
        self.unanswered_count += 1;
        id
    }

    /// Records that part `part` (from 0) of the `parts` parts of the response to request `id` has arrived.
    pub fn match_answer(&mut self, id: u32, part: u8, parts: u8) -> AnswerMatch {
        let index = id.wrapping_sub(self.first_id) as usize;
        let Some(entry) = self.entries.get_mut(index) else {
            let back = u64::from(self.first_id.wrapping_sub(id));
            let settled = self.sent_count - self.entries.len() as u64;
            return if back > 0 && back <= settled { AnswerMatch::Late } else { AnswerMatch::Unknown };
        };
        if part >= parts || parts > PARTS_MAX {
            return AnswerMatch::Unknown;
        }
        let bit = 1 << part;
        if entry.is_answered || entry.received_parts & bit != 0 {
            return AnswerMatch::Duplicate;
        }
        entry.received_parts |= bit;
        if entry.received_parts.count_ones() < parts.into() {
            return AnswerMatch::Partial;
        }
        entry.is_answered = true;
        self.unanswered_count -= 1;
        AnswerMatch::Complete(entry.sent)
    }

    /// Removes all requests that were due before `moment_ns`, and passes each unanswered one to `each`. Requests must
    /// have been added in the order of their due times.
    pub fn expire(&mut self, moment_ns: u64, mut each: impl FnMut(SentRequest)) {
        while let Some(entry) = self.entries.front().filter(|entry| entry.sent.due_ns < moment_ns) {
            if !entry.is_answered {
                self.unanswered_count -= 1;
                each(entry.sent);
            }
            self.entries.pop_front();
            self.first_id = self.first_id.wrapping_add(1);
        }
    }

    /// Returns the number of requests that have not timed out and have no complete response.
    pub fn unanswered_count(&self) -> usize {
        self.unanswered_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(due_ns: u64) -> SentRequest {
        SentRequest { due_ns, class: 0 }
    }

    #[test]
    fn every_answer_is_distinguished() {
        let mut outstanding = Outstanding::default();
        let ids: Vec<u32> = (0..4).map(|due| outstanding.add(sent(due))).collect();
        assert_eq!(outstanding.match_answer(ids[1], 0, 1), AnswerMatch::Complete(sent(1)));
        assert_eq!(outstanding.match_answer(ids[1], 0, 1), AnswerMatch::Duplicate);
        assert_eq!(outstanding.match_answer(ids[2], 1, 2), AnswerMatch::Partial);
        assert_eq!(outstanding.match_answer(ids[2], 1, 2), AnswerMatch::Duplicate);
        assert_eq!(outstanding.match_answer(ids[2], 2, 2), AnswerMatch::Unknown);
        assert_eq!(outstanding.match_answer(4, 0, 1), AnswerMatch::Unknown);
        assert_eq!(outstanding.match_answer(u32::MAX, 0, 1), AnswerMatch::Unknown);
        let mut lost = Vec::new();
        outstanding.expire(2, |sent| lost.push(sent.due_ns));
        assert_eq!((lost, outstanding.unanswered_count()), (vec![0], 2));
        assert_eq!(outstanding.match_answer(ids[0], 0, 1), AnswerMatch::Late);
        assert_eq!(outstanding.match_answer(ids[2], 0, 2), AnswerMatch::Complete(sent(2)));
        let mut lost = Vec::new();
        outstanding.expire(u64::MAX, |sent| lost.push(sent.due_ns));
        assert_eq!((lost, outstanding.unanswered_count()), (vec![3], 0));
        assert_eq!(outstanding.match_answer(ids[3], 0, 1), AnswerMatch::Late);
    }

    #[test]
    fn request_ids_wrap_around() {
        let mut outstanding = Outstanding { first_id: u32::MAX - 1, ..Outstanding::default() };
        let ids: Vec<u32> = (0..4).map(|due| outstanding.add(sent(due))).collect();
        assert_eq!(ids, [u32::MAX - 1, u32::MAX, 0, 1]);
        assert_eq!(outstanding.match_answer(0, 0, 1), AnswerMatch::Complete(sent(2)));
        outstanding.expire(u64::MAX, |_| {});
        assert_eq!(outstanding.match_answer(u32::MAX, 0, 1), AnswerMatch::Late);
        assert_eq!(outstanding.match_answer(1, 0, 1), AnswerMatch::Late);
        assert_eq!(outstanding.match_answer(2, 0, 1), AnswerMatch::Unknown);
    }
}
