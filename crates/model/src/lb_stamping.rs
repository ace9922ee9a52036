//! LB-side stamping (`timestamps = "lb"`), with the cookie that the load balancer puts into servers' replies, and the
//! servers' clocks that it learns from them. `bpf/lb/lb_cookie.h` gives the reasons.
//!
//! ```text
//! 31                                12 11  10            0
//! +-----------------------------------+---+---------------+
//! |  (ms + time mask) mod 2^20        | K |  server's id  |
//! +-----------------------------------+---+---------------+
//! ```

use std::collections::HashMap;

use coreward_intf as intf;

use crate::connection_table::{ConnectionHash, fold_client_address};
use crate::cookie::{self, CookieKey, CookieKeyIndex, FleetCookieKeys, KeyedPermutation};
use crate::rss::seeded_rng;
use crate::{FourTuple, ServerId};

/// Number of server ids that a cookie of LB-side stamping can carry. The ids start at 0.
pub const STAMPABLE_SERVER_ID_COUNT: u64 = intf::LB_STAMPING_ID_MASK as u64 + 1;

/// Number of consecutive connections with agreeing SYN-ACKs after which a server's new connections are stamped.
pub const MIN_AGREEING_SYN_ACKS: u16 = intf::LB_STAMPING_AGREEING as u16;

const MAX_STEADY_SAMPLES: u16 = intf::LB_STAMPING_MAX_STEADY as u16;

/// Number of the random-number stream ([`seeded_rng`]) from which time keys are drawn.
const TIME_KEY_RNG_STREAM: u64 = 8;

/// Returns whether a cookie of LB-side stamping can carry the server's id.
pub fn can_carry_server_id(id: ServerId) -> bool {
    u64::from(id.get()) < STAMPABLE_SERVER_ID_COUNT
}

/// Returns the key that masks the time in a service's cookies. The seed is the service's, so the key is the same at all
/// load balancers, and does not change with the fleet's keys.
pub fn draw_time_key(service_seed: u64) -> CookieKey {
    CookieKey::random(&mut seeded_rng(service_seed, TIME_KEY_RNG_STREAM))
}

fn time_part_addend(time_key: &CookieKey, tuple: &FourTuple) -> u32 {
    cookie::cookie_hash(time_key, tuple) as u32 & intf::LB_STAMPING_TIME_MASK
}

/// Returns the stamped TSval for the client. It combines the server's own TSval with the server's id, hidden with the
/// current key. In place of 0 (RFC 7323, Sect. 3.2), returns the TSval of the next millisecond.
pub fn stamp_tsval(
    keys: &FleetCookieKeys,
    time_key: &CookieKey,
    tuple: &FourTuple,
    id: ServerId,
    server_tsval_ms: u32,
) -> u32 {
    let key_bit = if keys.current_key_index == CookieKeyIndex::Second { intf::LB_STAMPING_KEY_BIT } else { 0 };
    let time_part = server_tsval_ms.wrapping_add(time_part_addend(time_key, tuple)) & intf::LB_STAMPING_TIME_MASK;
    let hash = cookie::cookie_hash(&keys.keys[keys.current_key_index.get()], tuple);
    let hidden_id = KeyedPermutation::LB_STAMPED_COOKIE.hide(hash, u32::from(id.get()) & intf::LB_STAMPING_ID_MASK);
    let stamped_tsval = time_part << intf::LB_STAMPING_TIME_SHIFT | key_bit | hidden_id;
    if stamped_tsval == 0 { 1 << intf::LB_STAMPING_TIME_SHIFT } else { stamped_tsval }
}

/// Returns the server's id in the TSecr of a client's packet, which must echo a stamped TSval.
pub fn decode_server_id(keys: &FleetCookieKeys, tuple: &FourTuple, tsecr: u32) -> ServerId {
    let key = &keys.keys[usize::from(tsecr & intf::LB_STAMPING_KEY_BIT != 0)];
    let id =
        KeyedPermutation::LB_STAMPED_COOKIE.reveal(cookie::cookie_hash(key, tuple), tsecr & intf::LB_STAMPING_ID_MASK);
    ServerId::try_from(u64::from(id)).expect("11 bits")
}

/// Returns the server's own TSval that `tsecr` echoes. It is the latest time of the connection's clock with the same
/// low 20 bits. `server_clock_ms` is the current time of that clock. The result is correct for values up to 16 minutes
/// old.
pub fn restore_tsval(time_key: &CookieKey, tuple: &FourTuple, tsecr: u32, server_clock_ms: u32) -> u32 {
    let time_part = (tsecr >> intf::LB_STAMPING_TIME_SHIFT).wrapping_sub(time_part_addend(time_key, tuple));
    let latest_tsval_ms = server_clock_ms.wrapping_add(intf::LB_STAMPING_SLACK_MS);
    latest_tsval_ms.wrapping_sub(latest_tsval_ms.wrapping_sub(time_part) & intf::LB_STAMPING_TIME_MASK)
}

/// Load balancer's knowledge of a server's TSval clock, as in `struct lb_stamped_server` of
/// `bpf/include/server_clock.h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServerClock {
    /// TSval minus the load balancer's clock (ms, modulo 2^32) if all connections share this difference, or `None` if
    /// it is unknown.
    pub shared_offset_ms: Option<u32>,
    newest_offset_ms: u32,
    newest_connection_word: u32,
    /// Number of consecutive SYN-ACKs with the same clock, the newest included (at most [`MIN_AGREEING_SYN_ACKS`]).
    pub agreeing_syn_ack_count: u16,
    /// [`connection_word`] of the connection whose clock is sampled, or 0 if none is.
    sampled_connection_word: u32,
    sampled_offset_ms: u32,
    sampled_at_ms: u32,
    /// Number of samples in which the clock ticked in ms, at most 8. A sample with another tick halves the number.
    pub steady_sample_count: u16,
    /// Whether the clock did not tick in ms in the newest sample.
    pub is_unsteady: bool,
    /// Number of SYN-ACKs, with or without timestamps.
    pub syn_ack_count: u64,
    /// Number of SYN-ACKs with timestamps.
    pub timestamped_syn_ack_count: u64,
    /// Number of replies whose clock offset differed from that of an earlier reply of another connection.
    pub offset_disagreement_count: u64,
}

impl ServerClock {
    /// Returns whether enough SYN-ACKs showed that all connections of the server share one clock.
    pub fn is_shared_clock_verified(&self) -> bool {
        self.agreeing_syn_ack_count >= MIN_AGREEING_SYN_ACKS
    }

    /// Returns whether new connections of the server can be stamped.
    pub fn can_stamp_connections(&self) -> bool {
        self.is_shared_clock_verified() || self.steady_sample_count >= MIN_AGREEING_SYN_ACKS
    }

    /// Returns whether two connections of the server had different offsets.
    pub fn has_different_offsets(&self) -> bool {
        self.offset_disagreement_count > 0
    }

    /// Records a SYN-ACK at `now_ms`, with its TSval if it has one. `connection_word` is the connection's
    /// [`connection_word`].
    pub fn record_syn_ack(&mut self, connection_word: u32, server_tsval_ms: Option<u32>, now_ms: u32) {
        self.syn_ack_count += 1;
        let Some(milliseconds) = server_tsval_ms else { return };
        self.timestamped_syn_ack_count += 1;
        let offset_ms = milliseconds.wrapping_sub(now_ms);
        if self.agreeing_syn_ack_count == 0
            || !may_be_same_clock(offset_ms, self.newest_offset_ms, intf::LB_STAMPING_TOLERANCE_MS)
        {
            self.offset_disagreement_count += u64::from(self.agreeing_syn_ack_count > 0);
            self.agreeing_syn_ack_count = 1;
        } else if !self.is_shared_clock_verified() && connection_word != self.newest_connection_word {
            self.agreeing_syn_ack_count += 1;
        }
        (self.newest_offset_ms, self.newest_connection_word) = (offset_ms, connection_word);
        let is_near_known_offset =
            |known_offset_ms| may_be_same_clock(offset_ms, known_offset_ms, intf::LB_STAMPING_TOLERANCE_MS / 2);
        if self.is_shared_clock_verified() && !self.shared_offset_ms.is_some_and(is_near_known_offset) {
            self.shared_offset_ms = Some(offset_ms);
        }
    }

    /// Records a reply other than a reset. Two replies of one connection show whether the clock ticks in ms.
    pub fn record_reply_tsval(&mut self, connection_word: u32, server_tsval_ms: u32, now_ms: u32) {
        let offset_ms = server_tsval_ms.wrapping_sub(now_ms);
        let elapsed_ms = now_ms.wrapping_sub(self.sampled_at_ms);
        if self.sampled_connection_word != 0 && connection_word == self.sampled_connection_word {
            if elapsed_ms < intf::LB_STAMPING_SAMPLE_MS {
                return;
            }
            self.is_unsteady = !may_be_same_clock(offset_ms, self.sampled_offset_ms, elapsed_ms / 2);
            self.steady_sample_count = if self.is_unsteady {
                self.steady_sample_count / 2
            } else {
                MAX_STEADY_SAMPLES.min(self.steady_sample_count + 1)
            };
            self.sampled_connection_word = 0;
        } else if self.sampled_connection_word == 0 || elapsed_ms > intf::LB_STAMPING_SAMPLE_EXPIRES_MS {
            (self.sampled_connection_word, self.sampled_offset_ms, self.sampled_at_ms) =
                (connection_word, offset_ms, now_ms);
        }
    }

    /// Returns the clock offset of a stamped connection, from its reply at `now_ms`, and stores the offset if it is
    /// new.
    pub fn record_stamped_reply(
        &mut self,
        connection_offsets: &mut ConnectionClockOffsets,
        hash: ConnectionHash,
        server_tsval_ms: u32,
        now_ms: u32,
    ) -> u32 {
        let offset_ms = server_tsval_ms.wrapping_sub(now_ms);
        if !self.has_different_offsets() {
            let shared_offset_ms = *self.shared_offset_ms.get_or_insert(offset_ms);
            if may_be_same_clock(offset_ms, shared_offset_ms, intf::LB_STAMPING_TOLERANCE_MS) {
                return shared_offset_ms;
            }
            self.offset_disagreement_count = 1;
        }
        connection_offsets.find_or_store_offset_ms(hash, offset_ms)
    }

    /// Returns the clock offset of a stamped connection, or `None` if it is unknown.
    pub fn connection_offset_ms(
        &self,
        connection_offsets: &ConnectionClockOffsets,
        hash: ConnectionHash,
    ) -> Option<u32> {
        if self.has_different_offsets() { connection_offsets.find_offset_ms(hash) } else { self.shared_offset_ms }
    }
}

/// Clock offsets of stamped connections to servers without a shared clock, as in `lb_stamped_offsets` of
/// `bpf/lb/clocks.h`.
#[derive(Debug, Default)]
pub struct ConnectionClockOffsets {
    /// Tag and clock offset (ms) of a connection, by an index that the connection's hash selects.
    tag_and_offset_by_index: HashMap<u32, (u32, u32)>,
}

impl ConnectionClockOffsets {
    fn offset_table_index(hash: ConnectionHash) -> u32 {
        hash.low_half() % intf::LB_STAMPED_OFFSETS
    }

    fn find_offset_ms(&self, hash: ConnectionHash) -> Option<u32> {
        self.tag_and_offset_by_index
            .get(&Self::offset_table_index(hash))
            .filter(|(tag, _)| *tag == hash.entry_tag() | 1)
            .map(|(_, offset_ms)| *offset_ms)
    }

    /// Stores the offset of a connection if it is new, and returns the stored offset.
    fn find_or_store_offset_ms(&mut self, hash: ConnectionHash, offset_ms: u32) -> u32 {
        let is_near_known_offset =
            |known_offset_ms: &u32| may_be_same_clock(offset_ms, *known_offset_ms, intf::LB_STAMPING_TOLERANCE_MS / 2);
        self.find_offset_ms(hash).filter(is_near_known_offset).unwrap_or_else(|| {
            self.tag_and_offset_by_index.insert(Self::offset_table_index(hash), (hash.entry_tag() | 1, offset_ms));
            offset_ms
        })
    }
}

/// Returns whether two clock offsets may come from the same clock, within the tolerance.
fn may_be_same_clock(offset_ms: u32, other_offset_ms: u32, tolerance_ms: u32) -> bool {
    offset_ms.wrapping_sub(other_offset_ms).wrapping_add(tolerance_ms) <= 2 * tolerance_ms
}

/// Returns a word that identifies a connection in [`ServerClock`]. It is the keyed hash of the client's address, XORed
/// with the ports in network byte order.
pub fn connection_word(key: &CookieKey, tuple: &FourTuple) -> u32 {
    let bytes = tuple.bytes();
    let port_bytes = u32::from_ne_bytes(bytes[bytes.len() - 4..].try_into().expect("four bytes"));
    fold_client_address(key, tuple.client().ip()) ^ port_bytes
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn build_four_tuple(client_address: u32, port: u16) -> FourTuple {
        FourTuple::ipv4((Ipv4Addr::from(client_address), port), (Ipv4Addr::new(10, 200, 0, 1), 80))
    }

    proptest! {
        #[test]
        fn server_id_and_server_tsval_are_recovered_from_the_tsecr(
            seed: u64, key_words: [u64; 4], is_second_current: bool, client: u32, port: u16,
            id in 0..STAMPABLE_SERVER_ID_COUNT, sent_ms: u32,
            age_ms in 0u32..900_000, clock_lag_ms in 0u32..50_000,
        ) {
            let current_key = if is_second_current { CookieKeyIndex::Second } else { CookieKeyIndex::First };
            let keys =
                [CookieKey { k0: key_words[0], k1: key_words[1] }, CookieKey { k0: key_words[2], k1: key_words[3] }];
            let keys = FleetCookieKeys { keys, current_key_index: current_key };
            let (time_key, tuple) = (draw_time_key(seed), build_four_tuple(client, port));
            let id = ServerId::try_from(id).unwrap();
            let stamped_tsval = stamp_tsval(&keys, &time_key, &tuple, id, sent_ms);
            prop_assert_ne!(stamped_tsval, 0);
            prop_assert_eq!(decode_server_id(
                &FleetCookieKeys { current_key_index: CookieKeyIndex::First, ..keys }, &tuple,
                stamped_tsval), id);
            // The load balancer's estimate of the clock may be behind the server's clock.
            let clock_ms = sent_ms.wrapping_add(age_ms).wrapping_sub(clock_lag_ms);
            let restored_tsval = restore_tsval(&time_key, &tuple, stamped_tsval, clock_ms);
            prop_assert!(restored_tsval == sent_ms || restored_tsval == sent_ms.wrapping_add(1));
        }

        /// The later of two TSvals less than 524 s apart is not earlier after stamping, even if the key changes.
        #[test]
        fn stamped_tsval_never_decreases_when_the_key_changes(
            seed: u64, key_words: [u64; 4], client: u32, sent_ms: u32, delay_ms in 1u32..524_000,
            id in 0..STAMPABLE_SERVER_ID_COUNT,
        ) {
            let keys =
                [CookieKey { k0: key_words[0], k1: key_words[1] }, CookieKey { k0: key_words[2], k1: key_words[3] }];
            let (time_key, tuple, id) =
                (draw_time_key(seed), build_four_tuple(client, 7), ServerId::try_from(id).unwrap());
            let stamp_with_key = |current_key_index,
                ms| stamp_tsval(&FleetCookieKeys { keys, current_key_index }, &time_key, &tuple, id, ms);
            let (first_tsval, second_tsval) = (stamp_with_key(CookieKeyIndex::Second, sent_ms),
                stamp_with_key(CookieKeyIndex::First, sent_ms.wrapping_add(delay_ms)));
            prop_assert!(second_tsval.wrapping_sub(first_tsval) as i32 >= 0);
        }
    }

    #[test]
    fn shared_clock_is_verified_after_several_agreeing_connections() {
        let mut clock = ServerClock::default();
        for second in 0..10u32 {
            clock.record_syn_ack(1, Some(5_000_000 + second * 1000), 7 + second * 1000);
        }
        assert_eq!(
            (clock.agreeing_syn_ack_count, clock.is_shared_clock_verified(), clock.shared_offset_ms),
            (1, false, None)
        );
        for port in 2..5 {
            clock.record_syn_ack(port, Some(5_010_100), 10_000);
        }
        assert!(clock.is_shared_clock_verified() && clock.offset_disagreement_count == 0);
        assert_eq!(clock.shared_offset_ms, Some(5_000_100));
        // Small deviations keep the clock. A new clock ends stamping for new connections only.
        clock.record_syn_ack(9, Some(5_010_000), 10_200);
        assert_eq!((clock.shared_offset_ms, clock.is_shared_clock_verified()), (Some(5_000_100), true));
        clock.record_syn_ack(10, Some(77), 10_200);
        assert_eq!(
            (clock.shared_offset_ms, clock.is_shared_clock_verified(), clock.offset_disagreement_count),
            (Some(5_000_100), false, 1)
        );
        clock.record_syn_ack(11, None, 10_200);
        assert_eq!((clock.syn_ack_count, clock.timestamped_syn_ack_count), (16, 15));
    }

    fn connection_hash(port: u16) -> ConnectionHash {
        ConnectionHash::new(&CookieKey { k0: 5, k1: 6 }, 0, build_four_tuple(7, port).client())
    }

    #[test]
    fn restarted_load_balancer_learns_clock_offsets_from_any_reply() {
        let (mut clock, mut connection_offsets) = (ServerClock::default(), ConnectionClockOffsets::default());
        assert_eq!(clock.connection_offset_ms(&connection_offsets, connection_hash(1)), None);
        assert_eq!(clock.record_stamped_reply(&mut connection_offsets, connection_hash(1), 1_000, 400), 600);
        assert_eq!(clock.connection_offset_ms(&connection_offsets, connection_hash(2)), Some(600));
        // After a second clock, each connection has its own offset. The first connection's is unknown until the next
        // answer.
        assert_eq!(clock.record_stamped_reply(&mut connection_offsets, connection_hash(2), 9_000, 400), 8_600);
        assert_eq!(
            [1, 2].map(|port| clock.connection_offset_ms(&connection_offsets, connection_hash(port))),
            [None, Some(8_600)]
        );
        clock.record_stamped_reply(&mut connection_offsets, connection_hash(1), 1_500, 900);
        assert_eq!(clock.connection_offset_ms(&connection_offsets, connection_hash(1)), Some(600));
        // Delays do not change the offset, so that keys do not alternate.
        assert_eq!(clock.record_stamped_reply(&mut connection_offsets, connection_hash(1), 1_900, 1_700), 600);
        assert_eq!(clock.record_stamped_reply(&mut connection_offsets, connection_hash(1), 9_900, 1_700), 8_200);
    }

    /// Returns a clock after samples of `connection_count` connections, whose TSval grows by `tsval_ticks_per_ms`.
    fn sampled_clock(connection_count: u32, tsval_ticks_per_ms: f64) -> ServerClock {
        let mut clock = ServerClock::default();
        for connection in 1..=connection_count {
            for elapsed in [0, 20, 120] {
                let (own_ms, now_ms) = (connection << 20, connection * 1_000 + elapsed);
                clock.record_reply_tsval(connection, own_ms + (f64::from(elapsed) * tsval_ticks_per_ms) as u32, now_ms);
            }
        }
        clock
    }

    #[test]
    fn connection_clocks_that_tick_in_ms_permit_stamping() {
        assert!(!sampled_clock(3, 1.0).can_stamp_connections());
        assert!(sampled_clock(4, 1.0).can_stamp_connections() && !sampled_clock(4, 1.0).is_unsteady);
        // Delays of less than half of the distance between samples, 60 ms here.
        assert!(sampled_clock(4, 1.4).can_stamp_connections());
        // Ticks of 1 us, 4 ms and 10 ms.
        for tick in [1000.0, 0.25, 0.1] {
            assert!(sampled_clock(9, tick).is_unsteady && sampled_clock(9, tick).steady_sample_count == 0, "{tick}");
        }
        // One delay changes nothing, but several delays do.
        let mut clock = sampled_clock(9, 1.0);
        for (now_ms, can_be_stamped) in [(20_000, true), (40_000, false)] {
            clock.record_reply_tsval(1, 0, now_ms);
            clock.record_reply_tsval(1, 120_000, now_ms + 120);
            assert_eq!(clock.can_stamp_connections(), can_be_stamped, "{clock:?}");
        }
    }

    #[test]
    fn silent_sampled_connection_is_replaced_by_another() {
        let mut clock = ServerClock::default();
        clock.record_reply_tsval(1, 0, 0);
        clock.record_reply_tsval(2, 0, 2_000);
        clock.record_reply_tsval(2, 160, 2_160);
        assert_eq!(clock.steady_sample_count, 0);
        clock.record_reply_tsval(2, 260, 2_260);
        assert_eq!(clock.steady_sample_count, 1);
    }

    #[test]
    fn time_keys_differ_by_service() {
        assert_ne!(draw_time_key(1), draw_time_key(2));
        assert_eq!(draw_time_key(1), draw_time_key(1));
    }
}
