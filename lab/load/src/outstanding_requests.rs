//! Requests that were sent, but are neither answered nor lost yet.

use std::collections::VecDeque;

/// Due time and class of a request that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SentRequest {
    /// Time at which the request was due (CLOCK_MONOTONIC, ns).
    pub due_ns: u64,
    pub class_index: u8,
}

#[derive(Debug)]
struct OutstandingRequest {
    request: SentRequest,
    /// Bitmap of the response's parts that have been received.
    received_part_bits: u128,
    is_answered: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestAnswerOutcome {
    /// The answer completes the response to this request.
    Complete(SentRequest),
    /// The answer is a part of a response that is not complete yet.
    Partial,
    /// The answer repeats a part or response that was received before.
    Duplicate,
    /// The answer belongs to a request that has already timed out.
    Late,
    /// The answer has an id that no request had, or an impossible part number.
    Unknown,
}

/// Requests that were sent and have not timed out yet. Their ids count up from 0 and wrap around.
#[derive(Debug, Default)]
pub struct OutstandingRequests {
    /// Requests in the order in which they were sent, so that their ids are consecutive.
    entries: VecDeque<OutstandingRequest>,
    first_entry_id: u32,
    sent_request_count: u64,
    unanswered_request_count: usize,
}

const MAX_RESPONSE_PARTS: u8 = 128;

impl OutstandingRequests {
    /// Adds a request, and returns the id under which it must be sent.
    pub fn add_request(&mut self, sent_request: SentRequest) -> u32 {
        let id = self.first_entry_id.wrapping_add(self.entries.len() as u32);
        self.entries.push_back(OutstandingRequest { request: sent_request, received_part_bits: 0, is_answered: false });
        self.sent_request_count += 1;
        self.unanswered_request_count += 1;
        id
    }

    /// Records the arrival of part `part_index` (from 0) of the response to request `id`, which has `part_count` parts.
    pub fn record_response_part(&mut self, id: u32, part_index: u8, part_count: u8) -> RequestAnswerOutcome {
        let entry_index = id.wrapping_sub(self.first_entry_id) as usize;
        let Some(entry) = self.entries.get_mut(entry_index) else {
            let distance_before_first_id = u64::from(self.first_entry_id.wrapping_sub(id));
            let removed_request_count = self.sent_request_count - self.entries.len() as u64;
            return if distance_before_first_id > 0 && distance_before_first_id <= removed_request_count {
                RequestAnswerOutcome::Late
            } else {
                RequestAnswerOutcome::Unknown
            };
        };
        if part_index >= part_count || part_count > MAX_RESPONSE_PARTS {
            return RequestAnswerOutcome::Unknown;
        }
        let part_bit = 1 << part_index;
        if entry.is_answered || entry.received_part_bits & part_bit != 0 {
            return RequestAnswerOutcome::Duplicate;
        }
        entry.received_part_bits |= part_bit;
        if entry.received_part_bits.count_ones() < part_count.into() {
            return RequestAnswerOutcome::Partial;
        }
        entry.is_answered = true;
        self.unanswered_request_count -= 1;
        RequestAnswerOutcome::Complete(entry.request)
    }

    /// Removes all requests that were due before `due_before_ns`, and passes each unanswered one to `on_lost`. Requests
    /// must have been added in the order of their due times.
    pub fn remove_expired_requests(&mut self, due_before_ns: u64, mut on_lost: impl FnMut(SentRequest)) {
        while let Some(entry) = self.entries.front().filter(|entry| entry.request.due_ns < due_before_ns) {
            if !entry.is_answered {
                self.unanswered_request_count -= 1;
                on_lost(entry.request);
            }
            self.entries.pop_front();
            self.first_entry_id = self.first_entry_id.wrapping_add(1);
        }
    }

    /// Returns the number of requests that have neither timed out nor received a complete response.
    pub fn unanswered_request_count(&self) -> usize {
        self.unanswered_request_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build_sent_request(due_ns: u64) -> SentRequest {
        SentRequest { due_ns, class_index: 0 }
    }

    #[test]
    fn complete_partial_duplicate_late_and_unknown_answers_are_distinguished() {
        let mut outstanding_requests = OutstandingRequests::default();
        let request_ids: Vec<u32> =
            (0..4).map(|due_ns| outstanding_requests.add_request(build_sent_request(due_ns))).collect();
        assert_eq!(
            outstanding_requests.record_response_part(request_ids[1], 0, 1),
            RequestAnswerOutcome::Complete(build_sent_request(1))
        );
        assert_eq!(outstanding_requests.record_response_part(request_ids[1], 0, 1), RequestAnswerOutcome::Duplicate);
        assert_eq!(outstanding_requests.record_response_part(request_ids[2], 1, 2), RequestAnswerOutcome::Partial);
        assert_eq!(outstanding_requests.record_response_part(request_ids[2], 1, 2), RequestAnswerOutcome::Duplicate);
        assert_eq!(outstanding_requests.record_response_part(request_ids[2], 2, 2), RequestAnswerOutcome::Unknown);
        assert_eq!(outstanding_requests.record_response_part(4, 0, 1), RequestAnswerOutcome::Unknown);
        assert_eq!(outstanding_requests.record_response_part(u32::MAX, 0, 1), RequestAnswerOutcome::Unknown);
        let mut lost_due_times = Vec::new();
        outstanding_requests.remove_expired_requests(2, |lost_request| lost_due_times.push(lost_request.due_ns));
        assert_eq!((lost_due_times, outstanding_requests.unanswered_request_count()), (vec![0], 2));
        assert_eq!(outstanding_requests.record_response_part(request_ids[0], 0, 1), RequestAnswerOutcome::Late);
        assert_eq!(
            outstanding_requests.record_response_part(request_ids[2], 0, 2),
            RequestAnswerOutcome::Complete(build_sent_request(2))
        );
        let mut lost_due_times = Vec::new();
        outstanding_requests.remove_expired_requests(u64::MAX, |lost_request| lost_due_times.push(lost_request.due_ns));
        assert_eq!((lost_due_times, outstanding_requests.unanswered_request_count()), (vec![3], 0));
        assert_eq!(outstanding_requests.record_response_part(request_ids[3], 0, 1), RequestAnswerOutcome::Late);
    }

    #[test]
    fn answers_are_matched_after_request_ids_wrapped_around() {
        let mut outstanding_requests =
            OutstandingRequests { first_entry_id: u32::MAX - 1, ..OutstandingRequests::default() };
        let request_ids: Vec<u32> =
            (0..4).map(|due_ns| outstanding_requests.add_request(build_sent_request(due_ns))).collect();
        assert_eq!(request_ids, [u32::MAX - 1, u32::MAX, 0, 1]);
        assert_eq!(
            outstanding_requests.record_response_part(0, 0, 1),
            RequestAnswerOutcome::Complete(build_sent_request(2))
        );
        outstanding_requests.remove_expired_requests(u64::MAX, |_| {});
        assert_eq!(outstanding_requests.record_response_part(u32::MAX, 0, 1), RequestAnswerOutcome::Late);
        assert_eq!(outstanding_requests.record_response_part(1, 0, 1), RequestAnswerOutcome::Late);
        assert_eq!(outstanding_requests.record_response_part(2, 0, 1), RequestAnswerOutcome::Unknown);
    }
}
