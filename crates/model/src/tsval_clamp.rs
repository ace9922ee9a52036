//! PAWS clamp, which limits TSval after a connection's long silence, because the time part has only 16 bits.
//!
//! A client mistakes a step of 2^15 ms or more for a step back and drops the packet (PAWS, RFC 7323, Sect. 5). After so
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

/// Maximum increase (2^15 - 1 ms) of the TSval sent to a client over the TSval that the client last returned. A larger
/// increase is reduced to this value.
pub const MAX_TSVAL_STEP_MS: u32 = intf::MAX_STEP_MS;

/// Time part of a TSval that is sent to the client, with the TSval from which it is derived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TsvalTimePart {
    /// Time part (16 bits), without the mask that hides it in the TSval.
    pub time_bits: u16,
    /// Server's own TSval at the time of sending. It decides which of the fleet's keys stamps the packet.
    pub original_tsval: u32,
}

/// Record of a TSval whose increase was limited to the maximum step, as in `struct clamped_timestamp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ClampedTimestamp {
    clamped_time_part: TsvalTimePart,
    /// Client's last TSecr at the time when the TSval was clamped.
    previous_tsecr: TsvalTimePart,
    is_confirmed: bool,
}

/// State of the PAWS clamp of one connection.
#[derive(Debug, Clone, Default)]
pub struct PawsClamp {
    last_clamped_timestamp: Option<ClampedTimestamp>,
    /// Server's own TSval of the last clamped packet. For most packets, it shows without a look-up that no clamp
    /// applies. (The BPF program stores it per group of connections.)
    last_clamp_tsval_ms: u32,
}

impl PawsClamp {
    /// Returns the time part to send with a packet. `server_tsval_ms` is the server's own TSval. `last_tsecr` is the
    /// client's last TSecr as it was restored for the kernel, or 0 if there is none.
    pub fn time_part_to_send(&mut self, server_tsval_ms: u32, last_tsecr: u32) -> TsvalTimePart {
        let unclamped_time_part = TsvalTimePart { time_bits: server_tsval_ms as u16, original_tsval: server_tsval_ms };
        let elapsed_ms = server_tsval_ms.wrapping_sub(last_tsecr);
        // A genuine restored TSecr is never further ahead, so this one was forged.
        let is_forged = (elapsed_ms.wrapping_add(TSVAL_RESTORE_SLACK_MS) as i32) < 0;
        if last_tsecr == 0 || is_forged || elapsed_ms < MAX_TSVAL_STEP_MS && !self.was_clamped_recently(server_tsval_ms)
        {
            return unclamped_time_part;
        }
        let mut client_time_bits = last_tsecr as u16;
        match self.last_clamped_timestamp {
            Some(held_timestamp)
                if held_timestamp.is_confirmed && held_timestamp.clamped_time_part.original_tsval == last_tsecr =>
            {
                client_time_bits = held_timestamp.clamped_time_part.time_bits
            }
            Some(held_timestamp) if held_timestamp.previous_tsecr.original_tsval == last_tsecr => {
                self.last_clamp_tsval_ms = server_tsval_ms;
                return held_timestamp.clamped_time_part;
            }
            _ => {}
        }
        // Distance from the client's value to now. A distance of more than a turn remains more than a turn.
        let distance_ms = u32::from((last_tsecr as u16).wrapping_sub(client_time_bits)).wrapping_add(elapsed_ms);
        if distance_ms < MAX_TSVAL_STEP_MS {
            return unclamped_time_part;
        }
        let clamped_time_part = TsvalTimePart {
            time_bits: client_time_bits.wrapping_add(MAX_TSVAL_STEP_MS as u16),
            original_tsval: server_tsval_ms,
        };
        self.last_clamped_timestamp = Some(ClampedTimestamp {
            clamped_time_part,
            previous_tsecr: TsvalTimePart { time_bits: client_time_bits, original_tsval: last_tsecr },
            is_confirmed: false,
        });
        self.last_clamp_tsval_ms = server_tsval_ms;
        clamped_time_part
    }

    /// Returns whether a packet was clamped within about the last maximum step. Then the clamp may still apply,
    /// although the last TSecr is less than a maximum step old. (It may be restored to a time slightly after now.)
    fn was_clamped_recently(&self, server_tsval_ms: u32) -> bool {
        server_tsval_ms.wrapping_sub(self.last_clamp_tsval_ms) as i32
            <= (MAX_TSVAL_STEP_MS + TSVAL_RESTORE_SLACK_MS) as i32
    }

    /// Returns the server's own TSval for the time part of a TSecr that arrives at `now_ms`. Instead of 0 (once in 49
    /// days), returns the value one millisecond earlier, because the kernel reads 0 as "no TSecr".
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
        let Some(held_timestamp) = &mut self.last_clamped_timestamp else { return restore_tsval(time_part, now_ms) };
        if time_part == held_timestamp.clamped_time_part.time_bits {
            held_timestamp.is_confirmed = true;
            return held_timestamp.clamped_time_part.original_tsval;
        }
        if held_timestamp.is_confirmed {
            // The client has advanced, so these 16 bits may come from the clock again.
            self.last_clamped_timestamp = None;
            return restore_tsval(time_part, now_ms);
        }
        // This was sent before the clamped packet, so less than a largest step after the client's TSecr of that time.
        let TsvalTimePart { time_bits, original_tsval } = held_timestamp.previous_tsecr;
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
    use crate::cookie::{
        Cookie, CookieKey, CookieKeyIndex, FleetCookieKeys, decode_cookie, decode_time_part, stamp_tsval,
    };
    use crate::{FourTuple, ServerId};

    const TIME_KEY: CookieKey = CookieKey { k0: 77, k1: 78 };

    #[derive(Debug, Clone, Copy)]
    enum TestConnectionEvent {
        Packet {
            from_server: bool,
            is_lost: bool,
        },
        /// The oldest packet in flight arrives.
        Arrival {
            at_server: bool,
        },
        /// All packets in flight arrive, then no packet is sent for this time.
        Silence {
            milliseconds: u32,
        },
        /// A short time passes, during which packets stay in flight.
        Pause {
            milliseconds: u32,
        },
        /// The server switches to its other key, which then applies to TSvals from this delay after now.
        Switch {
            delay_ms: u32,
        },
    }

    fn event_sequences() -> impl Strategy<Value = Vec<TestConnectionEvent>> {
        let any_event = prop_oneof![
            6 => (any::<bool>(), prop::bool::weighted(0.2))
                .prop_map(|(from_server, is_lost)| TestConnectionEvent::Packet { from_server, is_lost }),
            4 => any::<bool>().prop_map(|at_server| TestConnectionEvent::Arrival { at_server }),
            2 => (0u32..60).prop_map(|milliseconds| TestConnectionEvent::Pause { milliseconds }),
            1 => (0u32..200_000).prop_map(|milliseconds| TestConnectionEvent::Silence { milliseconds }),
            // Around full and half turns of the circle.
            1 => (1u32..7, 0u32..40)
                .prop_map(|(wrap_count, extra_ms)| {
                    TestConnectionEvent::Silence { milliseconds: wrap_count * 32_768 - 20 + extra_ms }
                }),
            1 => (1u32..2000).prop_map(|delay_ms| TestConnectionEvent::Switch { delay_ms }),
        ];
        prop::collection::vec(any_event, 1..200)
    }

    #[derive(Debug, Clone, Copy)]
    struct TsvalInFlight {
        tsval: u32,
        sent_at_ms: u32,
    }

    /// Server and client of one connection, with the packets in flight between them.
    struct TestConnection {
        now_ms: u32,
        keys: FleetCookieKeys,
        key_switch_ms: u32,
        paws_clamp: PawsClamp,
        last_tsecr: u32,
        packets_to_client: VecDeque<TsvalInFlight>,
        packets_to_server: VecDeque<TsvalInFlight>,
        /// The client's ts_recent (RFC 7323, Sect. 4.3), or `None` before the SYN-ACK.
        client_ts_recent: Option<TsvalInFlight>,
        /// Whether the last TSecr was restored to a time that is too late. This happens if it is older than 65.5 s,
        /// because time parts then repeat.
        is_tsecr_wrapped: bool,
        tuple: FourTuple,
    }

    fn server_cookie() -> Cookie {
        Cookie::Server(ServerId::try_from(4711).unwrap())
    }

    impl TestConnection {
        fn new(now_ms: u32, port: u16) -> Self {
            let mut connection = Self {
                now_ms,
                keys: FleetCookieKeys {
                    keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }],
                    current_key_index: CookieKeyIndex::First,
                },
                key_switch_ms: now_ms.wrapping_sub(1000),
                paws_clamp: PawsClamp {
                    last_clamp_tsval_ms: now_ms.wrapping_sub(1 << 30),
                    last_clamped_timestamp: None,
                },
                last_tsecr: 0,
                packets_to_client: VecDeque::new(),
                packets_to_server: VecDeque::new(),
                client_ts_recent: None,
                is_tsecr_wrapped: false,
                tuple: FourTuple::ipv4((Ipv4Addr::new(10, 1, 0, 7), port), (Ipv4Addr::new(10, 200, 0, 1), 80)),
            };
            connection.simulate_round_trip();
            connection
        }

        fn simulate_round_trip(&mut self) {
            for (from_server, at_server) in [(true, false), (false, true)] {
                self.apply_event(TestConnectionEvent::Packet { from_server, is_lost: false });
                self.apply_event(TestConnectionEvent::Arrival { at_server });
            }
        }

        /// The server receives the oldest packet that is in flight to it, if there is one.
        fn receive_at_server(&mut self) {
            if let Some(tsecr) = self.packets_to_server.pop_front() {
                assert_eq!(decode_cookie(&self.keys, &self.tuple, tsecr.tsval), server_cookie());
                self.last_tsecr = self
                    .paws_clamp
                    .restore_original_tsval(decode_time_part(&TIME_KEY, &self.tuple, tsecr.tsval), self.now_ms);
                self.is_tsecr_wrapped = self.last_tsecr.wrapping_sub(tsecr.sent_at_ms) as i32 > 1 << 15;
                let ms_ahead = self.last_tsecr.wrapping_sub(self.now_ms) as i32;
                assert!(ms_ahead <= TSVAL_RESTORE_SLACK_MS as i32, "restored {ms_ahead} ms into the future");
            }
        }

        /// The client receives the oldest packet that is in flight to it, if there is one.
        fn receive_at_client(&mut self) {
            let Some(sent_tsval) = self.packets_to_client.pop_front() else { return };
            let ts_recent = self.client_ts_recent.unwrap_or(sent_tsval).tsval;
            let tsval_step = sent_tsval.tsval.wrapping_sub(ts_recent) as i32;
            // A packet of the same millisecond may have a key that came in between, and is lost. That happens once in
            // 65,536 times that keys change during a silence of more than a minute.
            let is_same_millisecond =
                self.is_tsecr_wrapped && (sent_tsval.tsval ^ ts_recent) >> intf::COOKIE_TIME_SHIFT == 0;
            assert!(tsval_step >= 0 || is_same_millisecond, "TSval {:#x} after {ts_recent:#x}", sent_tsval.tsval);
            if tsval_step >= 0 {
                self.client_ts_recent = Some(sent_tsval);
            }
        }

        /// Switches to the other key if the last switch is over and its clamped packets are confirmed. The controller's
        /// switches are hours apart, so TCP has given up silent connections before the next one.
        fn switch_key_if_safe(&mut self, delay_ms: u32) {
            let is_after_switch = |original: u32| original.wrapping_sub(self.key_switch_ms) as i32 >= 0;
            let is_clamp_after_switch = self.paws_clamp.last_clamped_timestamp.is_none_or(|held_timestamp| {
                held_timestamp.is_confirmed || is_after_switch(held_timestamp.clamped_time_part.original_tsval)
            });
            if is_after_switch(self.now_ms) && is_clamp_after_switch {
                self.keys.current_key_index = self.keys.current_key_index.other_index();
                self.key_switch_ms = self.now_ms.wrapping_add(delay_ms);
            }
        }

        fn apply_event(&mut self, event: TestConnectionEvent) {
            match event {
                TestConnectionEvent::Packet { from_server: true, is_lost } => {
                    let time_part = self.paws_clamp.time_part_to_send(self.now_ms, self.last_tsecr);
                    let keys = self.keys.keys_for_tsval(time_part.original_tsval, self.key_switch_ms);
                    let stamped_tsval =
                        stamp_tsval(&keys, &TIME_KEY, &self.tuple, server_cookie(), time_part.time_bits.into());
                    if !is_lost {
                        self.packets_to_client
                            .push_back(TsvalInFlight { tsval: stamped_tsval, sent_at_ms: self.now_ms });
                    }
                }
                TestConnectionEvent::Packet { from_server: false, is_lost } => {
                    self.packets_to_server.extend(self.client_ts_recent.filter(|_| !is_lost));
                }
                TestConnectionEvent::Arrival { at_server: true } => self.receive_at_server(),
                TestConnectionEvent::Arrival { at_server: false } => self.receive_at_client(),
                TestConnectionEvent::Silence { milliseconds } => {
                    while !self.packets_to_client.is_empty() || !self.packets_to_server.is_empty() {
                        self.apply_event(TestConnectionEvent::Arrival { at_server: false });
                        self.apply_event(TestConnectionEvent::Arrival { at_server: true });
                    }
                    self.now_ms = self.now_ms.wrapping_add(milliseconds);
                }
                TestConnectionEvent::Pause { milliseconds } => self.now_ms = self.now_ms.wrapping_add(milliseconds),
                TestConnectionEvent::Switch { delay_ms } => self.switch_key_if_safe(delay_ms),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5000))]
        #[test]
        fn client_never_receives_a_decreasing_tsval(start_ms: u32, port: u16, events in event_sequences()) {
            let mut connection = TestConnection::new(start_ms, port);
            events.into_iter().for_each(|event| connection.apply_event(event));
        }

        #[test]
        fn clamp_ends_within_a_few_round_trips_after_silence(start_ms: u32, port: u16, silence_ms in 0u32..2_000_000) {
            let mut connection = TestConnection::new(start_ms, port);
            connection.apply_event(TestConnectionEvent::Silence { milliseconds: silence_ms });
            // Every largest step is half of the circle.
            for _ in 0..=silence_ms / MAX_TSVAL_STEP_MS {
                connection.simulate_round_trip();
                // The kernel measures the time that has passed since it sent the packet.
                prop_assert_eq!(connection.last_tsecr, connection.now_ms);
            }
            let time_part = connection.paws_clamp.time_part_to_send(connection.now_ms, connection.last_tsecr);
            prop_assert_eq!(time_part.time_bits, connection.now_ms as u16);
        }
    }
}
