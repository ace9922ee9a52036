//! Trace that is read from an arrival log of the demo, in which each request is a packet.

use coreward_model::arrival_log::ArrivalLog;

use super::{CoreServiceRate, FlowFirstPacket, PacketBatch, PacketTrace, TraceError, TraceFlowEvent, TracePacket};

const MAX_BATCH_PACKETS: usize = 16_384;

pub struct ArrivalLogTrace {
    log: ArrivalLog,
    /// Requests of the log. Each has its time (us), its connection's number, and its own number within the connection.
    requests_by_due_time: Vec<(u64, u32, u32)>,
    next_request_index: usize,
    service_rate: CoreServiceRate,
}

impl ArrivalLogTrace {
    /// Creates the trace of an arrival log. Fails with an error that names `path` when the requests have different
    /// service times.
    pub fn new(log: ArrivalLog, path: &str) -> Result<Self, TraceError> {
        let first_service_us = log.arrivals.first().map_or(1, |arrival| arrival.service_us);
        if let Some(arrival) = log.arrivals.iter().find(|arrival| arrival.service_us != first_service_us) {
            let other_service_us = arrival.service_us;
            return Err(TraceError::MixedServiceTimes { path: path.to_owned(), first_service_us, other_service_us });
        }
        let mut requests = Vec::new();
        for (connection, arrival) in log.arrivals.iter().enumerate() {
            requests.extend(
                (0..arrival.request_count).map(|index| (arrival.request_due_us(index), connection as u32, index)),
            );
        }
        requests.sort_unstable();
        Ok(Self {
            log,
            requests_by_due_time: requests,
            next_request_index: 0,
            service_rate: CoreServiceRate { packets_per_s: 1e6 / f64::from(first_service_us) },
        })
    }
}

impl PacketTrace for ArrivalLogTrace {
    fn read(&mut self, batch: &mut PacketBatch) -> Result<(), TraceError> {
        batch.clear();
        let end_index = (self.next_request_index + MAX_BATCH_PACKETS).min(self.requests_by_due_time.len());
        for (due_us, connection, index) in &self.requests_by_due_time[self.next_request_index..end_index] {
            let arrival = &self.log.arrivals[*connection as usize];
            let event = match (*index == 0, *index + 1 == arrival.request_count) {
                (false, false) => TraceFlowEvent::NONE,
                (false, true) => TraceFlowEvent::CLOSES,
                (true, false) => TraceFlowEvent::OPENS,
                (true, true) => TraceFlowEvent::OPENS_AND_CLOSES,
            };
            if event.opens_flow() {
                let rate_pps = Some(1e6 / f64::from(arrival.request_interval_us.max(1)));
                batch.first_packets.push(FlowFirstPacket { tuple: arrival.four_tuple(), flow_rate_pps: rate_pps });
            }
            batch.packets.push(TracePacket { time_ns: due_us * 1_000, flow_number: *connection, wire_bytes: 0, event });
        }
        self.next_request_index = end_index;
        Ok(())
    }

    fn end_ns(&self) -> Option<u64> {
        Some(self.log.duration_us * 1_000)
    }

    fn core_service_rate(&self) -> Option<CoreServiceRate> {
        Some(self.service_rate)
    }
}
