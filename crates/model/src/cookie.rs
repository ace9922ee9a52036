//! The cookie in the TCP timestamp (Cheetah, NSDI'20, Sect. 3.2 and 4.1), in a layout that survives PAWS.
//!
//! The bit diagram is at the head of `bpf/intf.h`. The paper puts the cookie into the upper half of TSval; with today's
//! clients that fails PAWS (RFC 7323, Sect. 5): time must stand in the upper half. docs/design.md, "The cookie", says
//! what was measured.

use std::hash::Hasher as _;

use coreward_intf as intf;
use siphasher::sip::SipHasher13;

use crate::{FourTuple, ServerId};

/// A 128-bit secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CookieKey {
    /// First 64 bits.
    pub k0: u64,
    /// Second 64 bits.
    pub k1: u64,
}

/// Shows no secret.
impl std::fmt::Debug for CookieKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CookieKey(..)")
    }
}

/// The two keys of a fleet, and which of them stamps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FleetKeys {
    /// Both are accepted at any time.
    pub keys: [CookieKey; 2],
    /// Index of the one that new stamps use.
    pub current: KeyIndex,
}

/// Which of the two keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyIndex {
    /// Key bit 0.
    First,
    /// Key bit 1.
    Second,
}

impl KeyIndex {
    /// 0 or 1.
    pub fn get(self) -> usize {
        self as usize
    }
}

/// What a cookie says: its kind bit and its 14 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cookie {
    /// Stateless: the server's id.
    Server(ServerId),
    /// Stateful: an index into the connection table of one load balancer.
    TableIndex(u16),
}

/// The masks that hide time and id for one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Masks {
    /// Added to the time part, modulo 2^16.
    pub time: u16,
    /// XORed onto kind and id.
    pub id: u16,
}

/// SipHash-1-3 (Aumasson and Bernstein, INDOCRYPT'12) of the tuple's bytes. With 12 bytes of input it takes two blocks,
/// five rounds in all; HalfSipHash-1-3 would take seven and its key is half as long.
pub fn masks(key: &CookieKey, tuple: &FourTuple) -> Masks {
    let mut hasher = SipHasher13::new_with_keys(key.k0, key.k1);
    hasher.write(&tuple.bytes());
    let hash = hasher.finish();
    Masks { time: (hash >> 16) as u16, id: (hash & u64::from(intf::COOKIE_HIDDEN_MASK)) as u16 }
}

/// TSval as it goes to the client. `milliseconds` is the server's own TSval (its clock in ms, low 16 bits count).
///
/// Never 0, which a client reads as "no echo" (RFC 7323, Sect. 3.2): the time is then taken as one millisecond later.
pub fn stamp(keys: &FleetKeys, tuple: &FourTuple, cookie: Cookie, milliseconds: u32) -> u32 {
    let masks = masks(&keys.keys[keys.current.get()], tuple);
    let plain = match cookie {
        Cookie::Server(id) => id.get(),
        Cookie::TableIndex(index) => index & intf::COOKIE_ID_MASK as u16 | intf::COOKIE_KIND_BIT as u16,
    };
    let key_bit = if keys.current == KeyIndex::Second { intf::COOKIE_KEY_BIT } else { 0 };
    let low = u32::from(plain ^ masks.id) | key_bit;
    let high = (milliseconds as u16).wrapping_add(masks.time);
    let stamped = u32::from(high) << intf::COOKIE_TIME_SHIFT | low;
    if stamped == 0 { 1 << intf::COOKIE_TIME_SHIFT } else { stamped }
}

/// What the client's echo (TSecr) says: the cookie, and the time part that was sent.
pub fn recognise(keys: &FleetKeys, tuple: &FourTuple, echo: u32) -> (Cookie, u16) {
    let key = &keys.keys[usize::from(echo & intf::COOKIE_KEY_BIT != 0)];
    let masks = masks(key, tuple);
    let plain = (echo as u16 ^ masks.id) & intf::COOKIE_HIDDEN_MASK as u16;
    let time = ((echo >> intf::COOKIE_TIME_SHIFT) as u16).wrapping_sub(masks.time);
    let number = plain & intf::COOKIE_ID_MASK as u16;
    let cookie = if plain & intf::COOKIE_KIND_BIT as u16 == 0 {
        Cookie::Server(ServerId::try_from(u64::from(number)).expect("14 bits"))
    } else {
        Cookie::TableIndex(number)
    };
    (cookie, time)
}

/// How far a server's own TSval may run ahead of the clock that restores it, in ms: the kernel's and BPF's clock are
/// read at different moments and rounded differently.
pub const RESTORE_SLACK_MS: u32 = intf::RESTORE_SLACK_MS;

/// The server's own TSval from the time part of an echo: the latest value not after `now_ms` + slack with these 16 low
/// bits. Right for echoes up to 65.5 s old.
pub fn restore(time: u16, now_ms: u32) -> u32 {
    let reference = now_ms.wrapping_add(RESTORE_SLACK_MS);
    reference.wrapping_sub(u32::from((reference as u16).wrapping_sub(time)))
}

/// Largest step of the time part that a client's PAWS check takes as "newer": 2^15 - 1 ms of signed 16-bit distance.
pub const LARGEST_STEP_MS: u16 = intf::LARGEST_STEP_MS as u16;

/// The hold rule: the time part to send, given the newest one the client is known to have accepted.
///
/// A connection idle for more than 32.8 s would jump by 2^15 ms or more and be dropped as old; it takes one step of
/// 32,767 ms instead, and the rest when the client has echoed that.
pub fn hold(time: u16, client_recent: u16) -> u16 {
    if time.wrapping_sub(client_recent) > LARGEST_STEP_MS { client_recent.wrapping_add(LARGEST_STEP_MS) } else { time }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn tuple(client: u32, port: u16) -> FourTuple {
        FourTuple::ipv4((Ipv4Addr::from(client), port), (Ipv4Addr::new(10, 200, 0, 1), 80))
    }

    fn keys(k: [u64; 4], second: bool) -> FleetKeys {
        FleetKeys {
            keys: [CookieKey { k0: k[0], k1: k[1] }, CookieKey { k0: k[2], k1: k[3] }],
            current: if second { KeyIndex::Second } else { KeyIndex::First },
        }
    }

    proptest! {
        #[test]
        fn an_echo_names_the_server_and_restores_the_time(
            k: [u64; 4], second: bool, client: u32, port: u16, id in 0u64..16_384, sent: u32, age in 0u32..65_000,
        ) {
            let keys = keys(k, second);
            let tuple = tuple(client, port);
            let server = ServerId::try_from(id).unwrap();
            let stamped = stamp(&keys, &tuple, Cookie::Server(server), sent);
            prop_assert_ne!(stamped, 0);
            // The key that stamps may have changed meanwhile; the echo's key bit says which it was.
            let rotated = FleetKeys { current: KeyIndex::First, ..keys };
            let (cookie, time) = recognise(&rotated, &tuple, stamped);
            prop_assert_eq!(cookie, Cookie::Server(server));
            let restored = restore(time, sent.wrapping_add(age));
            prop_assert!(restored == sent || restored == sent.wrapping_add(1));
        }

        #[test]
        fn a_client_never_sees_time_go_back(recent: u16, time: u16) {
            let step = hold(time, recent).wrapping_sub(recent);
            prop_assert!(step <= LARGEST_STEP_MS);
            // One hold is enough for any silence: the rest of the way is less than half the circle.
            let held = hold(time, recent);
            prop_assert_eq!(hold(time, held), time);
        }
    }

    #[test]
    fn zero_is_never_sent() {
        // A key and tuple for which the plain stamp would be 0, found by choosing id and time from the masks.
        let keys = keys([1, 2, 3, 4], false);
        let tuple = tuple(0x0a01_0007, 40312);
        let masks = masks(&keys.keys[0], &tuple);
        let cookie = if masks.id & intf::COOKIE_KIND_BIT as u16 == 0 {
            Cookie::Server(ServerId::try_from(u64::from(masks.id)).unwrap())
        } else {
            Cookie::TableIndex(masks.id & intf::COOKIE_ID_MASK as u16)
        };
        assert_eq!(stamp(&keys, &tuple, cookie, u32::from(masks.time.wrapping_neg())), 1 << 16);
    }
}
