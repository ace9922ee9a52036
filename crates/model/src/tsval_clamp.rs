//! PAWS clamp, which limits TSval after a connection's long silence, because the time part has only 16 bits.
//!
//! A client takes a step of 2^15 ms or more for a step back and drops the packet (PAWS, RFC 7323, Sect. 5). After so
//! long a silence since the client's last TSecr, the largest accepted step is sent until the client returns exactly
//! that value. Then the remaining time follows, by one more such step if needed.
//!
//! The newest value that the client has received is less than one largest step after the client's last TSecr, like
//! everything sent in between. So the largest step is always newer. After a full turn (65.5 s), equal time parts of
//! TSecr and clock prove nothing, because the client may have received more than it returned.
//!
//! `bpf/server/cookie_time.h` does the same with a map, in which one connection's entry corresponds to a [`PawsClamp`].

use coreward_intf as intf;

use crate::cookie::{TSVAL_RESTORE_SLACK_MS, restore_tsval};

/// Maximum step of TSval (2^15 - 1 ms), which is sent in place of a larger one.
pub const MAX_TSVAL_STEP_MS: u32 = intf::MAX_STEP_MS;

/// Time part of a TSval that is sent to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimePart {
    /// The 16 bits of the time part, before the time mask is added.
    pub time_bits: u16,
    /// The server's own TSval at that time, by which the fleet's key for the stamp is selected.
    pub original_tsval: u32,
}

/// A maximum step that was sent, as in `struct clamped_timestamp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ClampedTimestamp {
    clamped_time: TimePart,
    /// Last TSecr of the client before the step.
    last_tsecr: TimePart,
    is_confirmed: bool,
}

/// State of the PAWS clamp of one connection.
#[derive(Debug, Clone, Default)]
pub struct PawsClamp {
    held_timestamp: Option<ClampedTimestamp>,
    /// The server's own TSval of the last clamped packet in a group of connections. It makes the look-up unnecessary
    /// for most packets.
    last_clamp_ms: u32,
}

impl PawsClamp {
    /// Returns the time part to send with a packet. `milliseconds` is the server's own TSval. `last_tsecr` is the
    /// client's last TSecr as it was restored for the kernel, or 0 without one.
    pub fn time_part_to_send(&mut self, milliseconds: u32, last_tsecr: u32) -> TimePart {
        let unclamped_time = TimePart { time_bits: milliseconds as u16, original_tsval: milliseconds };
        let elapsed_ms = milliseconds.wrapping_sub(last_tsecr);
        // A genuine restored TSecr is never further ahead, so this one was forged.
        let is_forged = (elapsed_ms.wrapping_add(TSVAL_RESTORE_SLACK_MS) as i32) < 0;
        if last_tsecr == 0 || is_forged || elapsed_ms < MAX_TSVAL_STEP_MS && !self.was_clamped_recently(milliseconds) {
            return unclamped_time;
        }
        let mut client_time_bits = last_tsecr as u16;
        match self.held_timestamp {
            Some(held_timestamp)
                if held_timestamp.is_confirmed && held_timestamp.clamped_time.original_tsval == last_tsecr =>
            {
                client_time_bits = held_timestamp.clamped_time.time_bits
            }
            Some(held_timestamp) if held_timestamp.last_tsecr.original_tsval == last_tsecr => {
                self.last_clamp_ms = milliseconds;
                return held_timestamp.clamped_time;
            }
            _ => {}
        }
        // Distance from the client's value to now. A distance of more than a turn remains more than a turn.
        let distance_ms = u32::from((last_tsecr as u16).wrapping_sub(client_time_bits)).wrapping_add(elapsed_ms);
        if distance_ms < MAX_TSVAL_STEP_MS {
            return unclamped_time;
        }
        let clamped_time = TimePart {
            time_bits: client_time_bits.wrapping_add(MAX_TSVAL_STEP_MS as u16),
            original_tsval: milliseconds,
        };
        self.held_timestamp = Some(ClampedTimestamp {
            clamped_time,
            last_tsecr: TimePart { time_bits: client_time_bits, original_tsval: last_tsecr },
            is_confirmed: false,
        });
        self.last_clamp_ms = milliseconds;
        clamped_time
    }

    /// Returns whether a packet was clamped so recently that it may matter although the last TSecr is less than a
    /// maximum step old. (That TSecr may have been restored to a time slightly after now.)
    fn was_clamped_recently(&self, milliseconds: u32) -> bool {
        milliseconds.wrapping_sub(self.last_clamp_ms) as i32 <= (MAX_TSVAL_STEP_MS + TSVAL_RESTORE_SLACK_MS) as i32
    }

    /// Returns the server's own TSval for the time part of a TSecr that arrives at `now_ms`. The result is never 0,
    /// which the kernel reads as "no TSecr". Once in 49 days it is one millisecond earlier instead.
    pub fn restore_original_tsval(&mut self, time_part: u16, now_ms: u32) -> u32 {
        match self.restore_tsval_or_zero(time_part, now_ms) {
            0 => u32::MAX,
            original_tsval => original_tsval,
        }
    }

    fn restore_tsval_or_zero(&mut self, time_part: u16, now_ms: u32) -> u32 {
        if !self.was_clamped_recently(now_ms) {
            return restore_tsval(time_part, now_ms);
        }
        let Some(held_timestamp) = &mut self.held_timestamp else { return restore_tsval(time_part, now_ms) };
        if time_part == held_timestamp.clamped_time.time_bits {
            held_timestamp.is_confirmed = true;
            return held_timestamp.clamped_time.original_tsval;
        }
        if held_timestamp.is_confirmed {
            // The client has advanced, so these 16 bits may come from the clock again.
            self.held_timestamp = None;
            return restore_tsval(time_part, now_ms);
        }
        // This was sent before the clamped packet, so less than a largest step after the client's TSecr of that time.
        let TimePart { time_bits, original_tsval } = held_timestamp.last_tsecr;
        let (time_step, clamp_offset_ms) =
            (time_part.wrapping_sub(time_bits), (original_tsval as u16).wrapping_sub(time_bits));
        match (time_step, time_step.checked_sub(clamp_offset_ms)) {
            (0, _) => original_tsval,
            (_, Some(ms_after_tsecr)) if u32::from(time_step) < MAX_TSVAL_STEP_MS => {
                original_tsval.wrapping_add(ms_after_tsecr.into())
            }
            _ => restore_tsval(time_part, now_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;
    use crate::cookie::{Cookie, CookieKey, FleetCookieKeys, KeyIndex, decode_cookie, decode_time_part, stamp_tsval};
    use crate::{FourTuple, ServerId};

    const TIME_KEY: CookieKey = CookieKey { k0: 77, k1: 78 };

    #[derive(Debug, Clone, Copy)]
    enum Event {
        Packet {
            from_server: bool,
            is_lost: bool,
        },
        /// The oldest packet in flight arrives.
        Arrival {
            at_server: bool,
        },
        /// All packets arrive, then none is sent for this time.
        Silence {
            milliseconds: u32,
        },
        /// A short time passes, during which packets stay in flight.
        Pause {
            milliseconds: u32,
        },
        /// The other key becomes the current one, for TSvals that are at least this much later than now.
        Switch {
            delay_ms: u32,
        },
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let any_event = prop_oneof![
            6 => (any::<bool>(), prop::bool::weighted(0.2))
                .prop_map(|(from_server, is_lost)| Event::Packet { from_server, is_lost }),
            4 => any::<bool>().prop_map(|at_server| Event::Arrival { at_server }),
            2 => (0u32..60).prop_map(|milliseconds| Event::Pause { milliseconds }),
            1 => (0u32..200_000).prop_map(|milliseconds| Event::Silence { milliseconds }),
            // Around full and half turns of the circle.
            1 => (1u32..7, 0u32..40)
                .prop_map(|(wrap_count, extra_ms)| {
                    Event::Silence { milliseconds: wrap_count * 32_768 - 20 + extra_ms }
                }),
            1 => (1u32..2000).prop_map(|delay_ms| Event::Switch { delay_ms }),
        ];
        prop::collection::vec(any_event, 1..200)
    }

    #[derive(Debug, Clone, Copy)]
    struct SentTsval {
        value: u32,
        sent_at_ms: u32,
    }

    /// Server and client of one connection, and the packets in flight between them.
    struct Connection {
        now_ms: u32,
        keys: FleetCookieKeys,
        switch_ms: u32,
        paws_clamp: PawsClamp,
        last_tsecr: u32,
        packets_to_client: VecDeque<SentTsval>,
        packets_to_server: VecDeque<SentTsval>,
        /// The client's ts_recent (RFC 7323, Sect. 4.3), or `None` before the SYN-ACK.
        client_ts_recent: Option<SentTsval>,
        /// Whether the last TSecr was older than a turn of the circle, and so was restored to a later time.
        is_tsecr_wrapped: bool,
        tuple: FourTuple,
    }

    fn server_cookie() -> Cookie {
        Cookie::Server(ServerId::try_from(4711).unwrap())
    }

    impl Connection {
        fn new(now_ms: u32, port: u16) -> Self {
            let mut connection = Self {
                now_ms,
                keys: FleetCookieKeys {
                    keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }],
                    current: KeyIndex::First,
                },
                switch_ms: now_ms.wrapping_sub(1000),
                paws_clamp: PawsClamp { last_clamp_ms: now_ms.wrapping_sub(1 << 30), held_timestamp: None },
                last_tsecr: 0,
                packets_to_client: VecDeque::new(),
                packets_to_server: VecDeque::new(),
                client_ts_recent: None,
                is_tsecr_wrapped: false,
                tuple: FourTuple::ipv4((Ipv4Addr::new(10, 1, 0, 7), port), (Ipv4Addr::new(10, 200, 0, 1), 80)),
            };
            connection.round_trip();
            connection
        }

        fn round_trip(&mut self) {
            for (from_server, at_server) in [(true, false), (false, true)] {
                self.apply_event(Event::Packet { from_server, is_lost: false });
                self.apply_event(Event::Arrival { at_server });
            }
        }

        /// The server receives the oldest packet that is on its way, if there is one.
        fn receive_at_server(&mut self) {
            if let Some(tsecr) = self.packets_to_server.pop_front() {
                assert_eq!(decode_cookie(&self.keys, &self.tuple, tsecr.value), server_cookie());
                self.last_tsecr = self
                    .paws_clamp
                    .restore_original_tsval(decode_time_part(&TIME_KEY, &self.tuple, tsecr.value), self.now_ms);
                self.is_tsecr_wrapped = self.last_tsecr.wrapping_sub(tsecr.sent_at_ms) as i32 > 1 << 15;
                let ms_ahead = self.last_tsecr.wrapping_sub(self.now_ms) as i32;
                assert!(ms_ahead <= TSVAL_RESTORE_SLACK_MS as i32, "restored {ms_ahead} ms into the future");
            }
        }

        /// The client receives the oldest packet that is on its way, if there is one.
        fn receive_at_client(&mut self) {
            let Some(sent_tsval) = self.packets_to_client.pop_front() else { return };
            let ts_recent = self.client_ts_recent.unwrap_or(sent_tsval).value;
            let tsval_step = sent_tsval.value.wrapping_sub(ts_recent) as i32;
            // A packet of the same millisecond may have a key that came in between, and is lost. That happens once in
            // 65,536 times that keys change during a silence of more than a minute.
            let is_same_millisecond =
                self.is_tsecr_wrapped && (sent_tsval.value ^ ts_recent) >> intf::COOKIE_TIME_SHIFT == 0;
            assert!(tsval_step >= 0 || is_same_millisecond, "TSval {:#x} after {ts_recent:#x}", sent_tsval.value);
            if tsval_step >= 0 {
                self.client_ts_recent = Some(sent_tsval);
            }
        }

        /// Switches to the other key, if the last switch is over and TCP has given up connections of clients that have
        /// sent nothing since. The controller keeps switches hours apart.
        fn switch_key(&mut self, delay_ms: u32) {
            let is_after_switch = |original: u32| original.wrapping_sub(self.switch_ms) as i32 >= 0;
            let is_held_after_switch = self.paws_clamp.held_timestamp.is_none_or(|held_timestamp| {
                held_timestamp.is_confirmed || is_after_switch(held_timestamp.clamped_time.original_tsval)
            });
            if is_after_switch(self.now_ms) && is_held_after_switch {
                self.keys.current = self.keys.current.other();
                self.switch_ms = self.now_ms.wrapping_add(delay_ms);
            }
        }

        fn apply_event(&mut self, event: Event) {
            match event {
                Event::Packet { from_server: true, is_lost } => {
                    let time_part = self.paws_clamp.time_part_to_send(self.now_ms, self.last_tsecr);
                    let keys = self.keys.keys_for_tsval(time_part.original_tsval, self.switch_ms);
                    let stamped_tsval =
                        stamp_tsval(&keys, &TIME_KEY, &self.tuple, server_cookie(), time_part.time_bits.into());
                    if !is_lost {
                        self.packets_to_client.push_back(SentTsval { value: stamped_tsval, sent_at_ms: self.now_ms });
                    }
                }
                Event::Packet { from_server: false, is_lost } => {
                    self.packets_to_server.extend(self.client_ts_recent.filter(|_| !is_lost));
                }
                Event::Arrival { at_server: true } => self.receive_at_server(),
                Event::Arrival { at_server: false } => self.receive_at_client(),
                Event::Silence { milliseconds } => {
                    while !self.packets_to_client.is_empty() || !self.packets_to_server.is_empty() {
                        self.apply_event(Event::Arrival { at_server: false });
                        self.apply_event(Event::Arrival { at_server: true });
                    }
                    self.now_ms = self.now_ms.wrapping_add(milliseconds);
                }
                Event::Pause { milliseconds } => self.now_ms = self.now_ms.wrapping_add(milliseconds),
                Event::Switch { delay_ms } => self.switch_key(delay_ms),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5000))]
        #[test]
        fn tsval_never_decreases_for_a_client(start: u32, port: u16, events in events()) {
            let mut connection = Connection::new(start, port);
            events.into_iter().for_each(|event| connection.apply_event(event));
        }

        #[test]
        fn idle_connection_resumes_after_a_few_round_trips(start: u32, port: u16, silence in 0u32..2_000_000) {
            let mut connection = Connection::new(start, port);
            connection.apply_event(Event::Silence { milliseconds: silence });
            // Every largest step is half of the circle.
            for _ in 0..=silence / MAX_TSVAL_STEP_MS {
                connection.round_trip();
                // The kernel measures the time that has passed since it sent the packet.
                prop_assert_eq!(connection.last_tsecr, connection.now_ms);
            }
            let time_part = connection.paws_clamp.time_part_to_send(connection.now_ms, connection.last_tsecr);
            prop_assert_eq!(time_part.time_bits, connection.now_ms as u16);
        }
    }
}
