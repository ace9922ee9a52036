//! Times, on a server's TSval clock, at which the fleet's cookie keys become active.

use crate::cookie::{CookieKey, FleetCookieKeys};

/// Delay (ms) until a new current key becomes active. With pacing, the kernel gives packets a send time in the future,
/// but by less than this delay. So no later TSval has been sent (net/ipv4/tcp_output.c, tcp_update_skb_after_send).
const KEY_SWITCH_DELAY_MS: u32 = 1000;
/// Time (ms) by which the activation time of a key lies in the past if the key becomes active at once.
const IMMEDIATE_ACTIVATION_AGE_MS: u32 = 1 << 29;
/// Maximum age (ms) of an activation time. Older times are renewed, because 32-bit times are compared by the sign of
/// their difference.
const MAX_ACTIVATION_AGE_MS: u32 = 1 << 30;

/// Returns the TSval from which `new_keys` are active. `previous_keys` have been active since `switch_ms`.
pub fn key_activation_time_ms(
    (previous_keys, switch_ms): &(FleetCookieKeys, u32),
    new_keys: &FleetCookieKeys,
    now_ms: u32,
) -> u32 {
    let stamping_key = |keys: &FleetCookieKeys| keys.keys[keys.current_key_index.get()];
    if previous_keys.keys == [CookieKey { k0: 0, k1: 0 }; 2] {
        now_ms.wrapping_sub(IMMEDIATE_ACTIVATION_AGE_MS)
    } else if stamping_key(previous_keys) != stamping_key(new_keys) {
        now_ms.wrapping_add(KEY_SWITCH_DELAY_MS)
    } else {
        renewed_activation_time_ms(*switch_ms, now_ms)
    }
}

/// Returns the activation time `switch_ms`, or a later one if it is so old that it would soon seem to be in the future.
pub fn renewed_activation_time_ms(switch_ms: u32, now_ms: u32) -> u32 {
    let age_ms = now_ms.wrapping_sub(switch_ms);
    // From an age of 2^31 ms on, a time seems to be in the future.
    if (MAX_ACTIVATION_AGE_MS..1 << 31).contains(&age_ms) {
        now_ms.wrapping_sub(IMMEDIATE_ACTIVATION_AGE_MS)
    } else {
        switch_ms
    }
}

#[cfg(test)]
mod tests {
    use crate::cookie::CookieKeyIndex;

    use super::*;

    fn build_fleet_keys(first_key_word: u64, second_key_word: u64, current: CookieKeyIndex) -> FleetCookieKeys {
        FleetCookieKeys {
            keys: [first_key_word, second_key_word].map(|k0| CookieKey { k0, k1: 0 }),
            current_key_index: current,
        }
    }

    #[test]
    fn new_current_key_becomes_active_after_a_fixed_delay() {
        use CookieKeyIndex::{First, Second};
        let no_keys = (build_fleet_keys(0, 0, First), 0);
        assert_eq!(
            key_activation_time_ms(&no_keys, &build_fleet_keys(1, 2, Second), 5),
            5u32.wrapping_sub(IMMEDIATE_ACTIVATION_AGE_MS),
            "the first keys: at once"
        );
        let known_keys = (build_fleet_keys(1, 2, First), 77);
        assert_eq!(
            key_activation_time_ms(&known_keys, &build_fleet_keys(1, 3, First), 5000),
            77,
            "the key that is not in use was replaced"
        );
        assert_eq!(key_activation_time_ms(&known_keys, &build_fleet_keys(1, 2, Second), 5000), 6000);
        assert_eq!(
            key_activation_time_ms(&known_keys, &build_fleet_keys(1, 9, Second), 5000),
            6000,
            "both steps at once"
        );
        assert_eq!(
            key_activation_time_ms(&(build_fleet_keys(1, 2, Second), 6000), &build_fleet_keys(1, 2, Second), 5500),
            6000,
            "not over yet"
        );
    }

    #[test]
    fn key_switch_does_not_repeat_when_the_tsval_clock_wraps() {
        let current_keys = build_fleet_keys(1, 2, CookieKeyIndex::First);
        let (mut now_ms, mut switch_ms) = (5u32, 1005);
        for step in 0..100_000 {
            let stamping_key_index = current_keys.keys_for_tsval(now_ms, switch_ms).current_key_index;
            assert_eq!(stamping_key_index == current_keys.current_key_index, step > 0, "{now_ms} {switch_ms}");
            now_ms = now_ms.wrapping_add(123_456);
            switch_ms = renewed_activation_time_ms(switch_ms, now_ms);
        }
    }
}
