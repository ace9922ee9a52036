//! LB-side stamping (`timestamps = "lb"`): the cookie that the load balancer puts into servers' answers, and the
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
use crate::cookie::{self, CookieKey, FleetKeys, KeyIndex, Permutation};
use crate::rss::seeded_rng;
use crate::{FourTuple, ServerId};

/// Number of server ids that this cookie can carry: ids from 0 to one less.
pub const SERVER_ID_COUNT: u64 = intf::LB_STAMPING_ID_MASK as u64 + 1;

/// Number of consecutive connections with agreeing SYN-ACKs from which a server's new connections are stamped.
pub const MIN_AGREEING_SYN_ACKS: u16 = intf::LB_STAMPING_AGREEING as u16;

const MAX_STEADY: u16 = intf::LB_STAMPING_MAX_STEADY as u16;

/// Stream of [`seeded_rng`] from which time keys are drawn.
const RNG_STREAM_TIME_KEY: u64 = 8;

/// Returns whether a cookie can carry the server's id.
pub fn can_name(id: ServerId) -> bool {
    u64::from(id.get()) < SERVER_ID_COUNT
}

/// Returns the key that masks the time in a service's cookies, from the service's seed. It is the same at all load
/// balancers, and as long-lived as the service, independently of the fleet's keys.
pub fn time_key(seed: u64) -> CookieKey {
    CookieKey::random(&mut seeded_rng(seed, RNG_STREAM_TIME_KEY))
}

fn time_addend(time_key: &CookieKey, tuple: &FourTuple) -> u32 {
    cookie::cookie_hash(time_key, tuple) as u32 & intf::LB_STAMPING_TIME_MASK
}

/// Returns the TSval for the client: the server's own TSval `milliseconds`, and the server's id stamped with the
/// current key. Never 0 (RFC 7323, Sect. 3.2): the time is then taken as one millisecond later.
pub fn stamp_tsval(keys: &FleetKeys, time_key: &CookieKey, tuple: &FourTuple, id: ServerId, milliseconds: u32) -> u32 {
    let key_bit = if keys.current == KeyIndex::Second { intf::LB_STAMPING_KEY_BIT } else { 0 };
    let time = milliseconds.wrapping_add(time_addend(time_key, tuple)) & intf::LB_STAMPING_TIME_MASK;
    let hash = cookie::cookie_hash(&keys.keys[keys.current.get()], tuple);
    let id = Permutation::LB_STAMPED.hide(hash, u32::from(id.get()) & intf::LB_STAMPING_ID_MASK);
    let value = time << intf::LB_STAMPING_TIME_SHIFT | key_bit | id;
    if value == 0 { 1 << intf::LB_STAMPING_TIME_SHIFT } else { value }
}

/// Returns the id of the server in the TSecr of a client's packet, if the server's TSval was stamped.
pub fn decode_server_id(keys: &FleetKeys, tuple: &FourTuple, tsecr: u32) -> ServerId {
    let key = &keys.keys[usize::from(tsecr & intf::LB_STAMPING_KEY_BIT != 0)];
    let id = Permutation::LB_STAMPED.reveal(cookie::cookie_hash(key, tuple), tsecr & intf::LB_STAMPING_ID_MASK);
    ServerId::try_from(u64::from(id)).expect("11 bits")
}

/// Returns the server's own TSval for a TSecr: the latest time of the connection's clock with the same 20 bits.
/// `clock_ms` is the present time of that clock. Correct for values up to 16 minutes old.
pub fn restore_tsval(time_key: &CookieKey, tuple: &FourTuple, tsecr: u32, clock_ms: u32) -> u32 {
    let time = (tsecr >> intf::LB_STAMPING_TIME_SHIFT).wrapping_sub(time_addend(time_key, tuple));
    let latest = clock_ms.wrapping_add(intf::LB_STAMPING_SLACK_MS);
    latest.wrapping_sub(latest.wrapping_sub(time) & intf::LB_STAMPING_TIME_MASK)
}

/// TSval clock of a server: `struct lb_stamped_server` of `bpf/include/server_clock.h`, without the id.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServerClock {
    /// TSval minus the load balancer's clock (ms, modulo 2^32), if all connections share it. `None` if unknown.
    pub offset_ms: Option<u32>,
    newest_ms: u32,
    newest_client: u32,
    /// Number of consecutive SYN-ACKs that show the same clock, the newest included; at most [`MIN_AGREEING_SYN_ACKS`].
    pub agreeing_count: u16,
    /// [`connection_word`] of the connection that is sampled; 0 if none is.
    sampled_client: u32,
    sampled_ms: u32,
    sampled_at_ms: u32,
    /// Number of samples whose clock ticked in ms, at most 8. A sample whose clock did not tick in ms halves it.
    pub steady_samples: u16,
    /// Whether the clock of the newest sample did not tick in ms.
    pub is_unsteady: bool,
    /// Number of SYN-ACKs, with or without timestamps.
    pub syn_acks: u64,
    /// Number of SYN-ACKs with timestamps.
    pub syn_acks_with_timestamps: u64,
    /// Number of replies whose offset differed from that of another connection.
    pub disagreements: u64,
}

impl ServerClock {
    /// Returns whether the server's connections are known to share one clock.
    pub fn is_verified(&self) -> bool {
        self.agreeing_count >= MIN_AGREEING_SYN_ACKS
    }

    /// Returns whether new connections of the server are stamped.
    pub fn can_be_stamped(&self) -> bool {
        self.is_verified() || self.steady_samples >= MIN_AGREEING_SYN_ACKS
    }

    /// Returns whether the server's connections are known to have different offsets.
    pub fn has_connection_offsets(&self) -> bool {
        self.disagreements > 0
    }

    /// Records a SYN-ACK at `now_ms`, with its TSval, if it has one. `connection` is the [`connection_word`].
    pub fn record_syn_ack(&mut self, connection: u32, milliseconds: Option<u32>, now_ms: u32) {
        self.syn_acks += 1;
        let Some(milliseconds) = milliseconds else { return };
        self.syn_acks_with_timestamps += 1;
        let offset_ms = milliseconds.wrapping_sub(now_ms);
        if self.agreeing_count == 0 || !do_offsets_agree(offset_ms, self.newest_ms, intf::LB_STAMPING_TOLERANCE_MS) {
            self.disagreements += u64::from(self.agreeing_count > 0);
            self.agreeing_count = 1;
        } else if !self.is_verified() && connection != self.newest_client {
            self.agreeing_count += 1;
        }
        (self.newest_ms, self.newest_client) = (offset_ms, connection);
        let near = |known| do_offsets_agree(offset_ms, known, intf::LB_STAMPING_TOLERANCE_MS / 2);
        if self.is_verified() && !self.offset_ms.is_some_and(near) {
            self.offset_ms = Some(offset_ms);
        }
    }

    /// Records a reply other than a reset: two replies of one connection show whether the clock ticks in ms.
    pub fn record_sample(&mut self, connection: u32, milliseconds: u32, now_ms: u32) {
        let offset_ms = milliseconds.wrapping_sub(now_ms);
        let elapsed_ms = now_ms.wrapping_sub(self.sampled_at_ms);
        if self.sampled_client != 0 && connection == self.sampled_client {
            if elapsed_ms < intf::LB_STAMPING_SAMPLE_MS {
                return;
            }
            self.is_unsteady = !do_offsets_agree(offset_ms, self.sampled_ms, elapsed_ms / 2);
            self.steady_samples =
                if self.is_unsteady { self.steady_samples / 2 } else { MAX_STEADY.min(self.steady_samples + 1) };
            self.sampled_client = 0;
        } else if self.sampled_client == 0 || elapsed_ms > intf::LB_STAMPING_SAMPLE_EXPIRES_MS {
            (self.sampled_client, self.sampled_ms, self.sampled_at_ms) = (connection, offset_ms, now_ms);
        }
    }

    /// Returns the offset of a stamped connection from its reply at `now_ms`, and stores the offset if it is new.
    pub fn learn_offset(
        &mut self,
        own: &mut ConnectionOffsets,
        hash: ConnectionHash,
        milliseconds: u32,
        now_ms: u32,
    ) -> u32 {
        let offset_ms = milliseconds.wrapping_sub(now_ms);
        if !self.has_connection_offsets() {
            let shared = *self.offset_ms.get_or_insert(offset_ms);
            if do_offsets_agree(offset_ms, shared, intf::LB_STAMPING_TOLERANCE_MS) {
                return shared;
            }
            self.disagreements = 1;
        }
        own.learn(hash, offset_ms)
    }

    /// Returns the offset of a stamped connection; `None` if it is unknown.
    pub fn offset_of(&self, own: &ConnectionOffsets, hash: ConnectionHash) -> Option<u32> {
        if self.has_connection_offsets() { own.find(hash) } else { self.offset_ms }
    }
}

/// Offsets of stamped connections to servers without a shared clock: `lb_stamped_offsets` of `bpf/lb/clocks.h`.
#[derive(Debug, Default)]
pub struct ConnectionOffsets {
    /// Tag and offset (ms) of a connection, by index.
    words: HashMap<u32, (u32, u32)>,
}

impl ConnectionOffsets {
    fn index(hash: ConnectionHash) -> u32 {
        hash.low_half() % intf::LB_STAMPED_OFFSETS
    }

    fn find(&self, hash: ConnectionHash) -> Option<u32> {
        self.words.get(&Self::index(hash)).filter(|(tag, _)| *tag == hash.tag() | 1).map(|(_, offset_ms)| *offset_ms)
    }

    /// Stores the offset of a connection if it is new, and returns the stored offset.
    fn learn(&mut self, hash: ConnectionHash, offset_ms: u32) -> u32 {
        let near = |known: &u32| do_offsets_agree(offset_ms, *known, intf::LB_STAMPING_TOLERANCE_MS / 2);
        self.find(hash).filter(near).unwrap_or_else(|| {
            self.words.insert(Self::index(hash), (hash.tag() | 1, offset_ms));
            offset_ms
        })
    }
}

/// Returns whether two offsets may be of the same clock.
fn do_offsets_agree(offset_ms: u32, other_ms: u32, tolerance_ms: u32) -> bool {
    offset_ms.wrapping_sub(other_ms).wrapping_add(tolerance_ms) <= 2 * tolerance_ms
}

/// Returns a word that identifies a connection in [`ServerClock`]: the keyed hash of the client's address, XOR the
/// ports in network byte order.
pub fn connection_word(key: &CookieKey, tuple: &FourTuple) -> u32 {
    let bytes = tuple.bytes();
    let ports = u32::from_ne_bytes(bytes[bytes.len() - 4..].try_into().expect("four bytes"));
    fold_client_address(key, tuple.client().ip()) ^ ports
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn tuple(client: u32, port: u16) -> FourTuple {
        FourTuple::ipv4((Ipv4Addr::from(client), port), (Ipv4Addr::new(10, 200, 0, 1), 80))
    }

    proptest! {
        #[test]
        fn tsecr_names_the_server_and_returns_its_time(
            seed: u64, k: [u64; 4], second: bool, client: u32, port: u16, id in 0..SERVER_ID_COUNT, sent: u32,
            age in 0u32..900_000, early in 0u32..50_000,
        ) {
            let current = if second { KeyIndex::Second } else { KeyIndex::First };
            let keys = [CookieKey { k0: k[0], k1: k[1] }, CookieKey { k0: k[2], k1: k[3] }];
            let keys = FleetKeys { keys, current };
            let (time_key, tuple) = (time_key(seed), tuple(client, port));
            let id = ServerId::try_from(id).unwrap();
            let stamped = stamp_tsval(&keys, &time_key, &tuple, id, sent);
            prop_assert_ne!(stamped, 0);
            prop_assert_eq!(decode_server_id(&FleetKeys { current: KeyIndex::First, ..keys }, &tuple, stamped), id);
            // The load balancer's estimate of the clock may be behind the server's clock.
            let clock = sent.wrapping_add(age).wrapping_sub(early);
            let restored = restore_tsval(&time_key, &tuple, stamped, clock);
            prop_assert!(restored == sent || restored == sent.wrapping_add(1));
        }

        /// If two TSvals are less than 524 s apart, the later one gets a later TSval across any change of keys.
        #[test]
        fn tsval_is_monotonic_across_key_switch(
            seed: u64, k: [u64; 4], client: u32, sent: u32, later in 1u32..524_000, id in 0..SERVER_ID_COUNT,
        ) {
            let keys = [CookieKey { k0: k[0], k1: k[1] }, CookieKey { k0: k[2], k1: k[3] }];
            let (time_key, tuple, id) = (time_key(seed), tuple(client, 7), ServerId::try_from(id).unwrap());
            let with = |current, ms| stamp_tsval(&FleetKeys { keys, current }, &time_key, &tuple, id, ms);
            let (first, second) = (with(KeyIndex::Second, sent), with(KeyIndex::First, sent.wrapping_add(later)));
            prop_assert!(second.wrapping_sub(first) as i32 >= 0);
        }
    }

    #[test]
    fn clock_is_known_after_several_agreeing_connections() {
        let mut clock = ServerClock::default();
        for second in 0..10u32 {
            clock.record_syn_ack(1, Some(5_000_000 + second * 1000), 7 + second * 1000);
        }
        assert_eq!((clock.agreeing_count, clock.is_verified(), clock.offset_ms), (1, false, None));
        for port in 2..5 {
            clock.record_syn_ack(port, Some(5_010_100), 10_000);
        }
        assert!(clock.is_verified() && clock.disagreements == 0);
        assert_eq!(clock.offset_ms, Some(5_000_100));
        // Small deviations keep the clock. A new clock ends stamping for new connections only.
        clock.record_syn_ack(9, Some(5_010_000), 10_200);
        assert_eq!((clock.offset_ms, clock.is_verified()), (Some(5_000_100), true));
        clock.record_syn_ack(10, Some(77), 10_200);
        assert_eq!((clock.offset_ms, clock.is_verified(), clock.disagreements), (Some(5_000_100), false, 1));
        clock.record_syn_ack(11, None, 10_200);
        assert_eq!((clock.syn_acks, clock.syn_acks_with_timestamps), (16, 15));
    }

    fn hash(port: u16) -> ConnectionHash {
        ConnectionHash::new(&CookieKey { k0: 5, k1: 6 }, 0, tuple(7, port).client())
    }

    #[test]
    fn restarted_load_balancer_learns_the_clock_from_any_reply() {
        let (mut clock, mut own) = (ServerClock::default(), ConnectionOffsets::default());
        assert_eq!(clock.offset_of(&own, hash(1)), None);
        assert_eq!(clock.learn_offset(&mut own, hash(1), 1_000, 400), 600);
        assert_eq!(clock.offset_of(&own, hash(2)), Some(600));
        // A second clock: now each connection has its own offset. The first connection's is unknown until the next
        // answer.
        assert_eq!(clock.learn_offset(&mut own, hash(2), 9_000, 400), 8_600);
        assert_eq!([1, 2].map(|port| clock.offset_of(&own, hash(port))), [None, Some(8_600)]);
        clock.learn_offset(&mut own, hash(1), 1_500, 900);
        assert_eq!(clock.offset_of(&own, hash(1)), Some(600));
        // Delays do not change the offset, so that keys do not alternate.
        assert_eq!(clock.learn_offset(&mut own, hash(1), 1_900, 1_700), 600);
        assert_eq!(clock.learn_offset(&mut own, hash(1), 9_900, 1_700), 8_200);
    }

    /// Returns a clock after samples of `connections` connections, whose TSval grows by `tick` in each millisecond.
    fn sampled(connections: u32, tick: f64) -> ServerClock {
        let mut clock = ServerClock::default();
        for connection in 1..=connections {
            for elapsed in [0, 20, 120] {
                let (own_ms, now_ms) = (connection << 20, connection * 1_000 + elapsed);
                clock.record_sample(connection, own_ms + (f64::from(elapsed) * tick) as u32, now_ms);
            }
        }
        clock
    }

    #[test]
    fn clock_with_own_offsets_is_stamped_if_it_ticks_in_ms() {
        assert!(!sampled(3, 1.0).can_be_stamped());
        assert!(sampled(4, 1.0).can_be_stamped() && !sampled(4, 1.0).is_unsteady);
        // Delays of less than half of the distance between samples, 60 ms here.
        assert!(sampled(4, 1.4).can_be_stamped());
        // Ticks of 1 us, 4 ms and 10 ms.
        for tick in [1000.0, 0.25, 0.1] {
            assert!(sampled(9, tick).is_unsteady && sampled(9, tick).steady_samples == 0, "{tick}");
        }
        // One delay changes nothing; several delays do.
        let mut clock = sampled(9, 1.0);
        for (now_ms, can_be_stamped) in [(20_000, true), (40_000, false)] {
            clock.record_sample(1, 0, now_ms);
            clock.record_sample(1, 120_000, now_ms + 120);
            assert_eq!(clock.can_be_stamped(), can_be_stamped, "{clock:?}");
        }
    }

    #[test]
    fn silent_connection_does_not_stay_sampled() {
        let mut clock = ServerClock::default();
        clock.record_sample(1, 0, 0);
        clock.record_sample(2, 0, 2_000);
        clock.record_sample(2, 160, 2_160);
        assert_eq!(clock.steady_samples, 0);
        clock.record_sample(2, 260, 2_260);
        assert_eq!(clock.steady_samples, 1);
    }

    #[test]
    fn time_keys_differ_by_service() {
        assert_ne!(time_key(1), time_key(2));
        assert_eq!(time_key(1), time_key(1));
    }
}
