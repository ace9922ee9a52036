//! Text output of `coreward keys`.

use std::fmt::Write as _;
use std::time::Duration;

use coreward_api::types::{KeyPhase, Keys};

/// Formats the state of the cookie keys as text. `now` is the time since 1970.
pub fn format_key_status(keys: &Keys, now: Duration) -> String {
    let key_age = now.saturating_sub(Duration::from_secs(keys.current_since_unix_s));
    let mut text = format!("key {} stamps, for {} now\n", keys.current_key, format_duration(key_age));
    let waiting_peers = keys.pending_peers.join(", ");
    if keys.rotation_phase == KeyPhase::Announced {
        let _ = match waiting_peers.as_str() {
            "" => writeln!(text, "  rotation   the next key is everywhere, and about to stamp"),
            _ => writeln!(
                text,
                "  rotation   the next key (configuration {}) waits for {waiting_peers}",
                keys.configuration_generation
            ),
        };
        return text;
    }
    let time_until_age = |seconds: u64| Duration::from_secs(seconds).saturating_sub(key_age);
    let next_rotation = match (keys.rotation_interval_s, time_until_age(keys.min_key_age_s)) {
        (0, Duration::ZERO) => "by `coreward keys rotate`".to_owned(),
        (0, young) => format!("by `coreward keys rotate`, not within {}", format_duration(young)),
        (interval, _) => match time_until_age(interval) {
            Duration::ZERO => "due now".to_owned(),
            left => format!("in {}", format_duration(left)),
        },
    };
    let _ = writeln!(text, "  rotation   {next_rotation}");
    if !waiting_peers.is_empty() {
        let _ = writeln!(
            text,
            "  ! configuration {}, which brought the keys, is not confirmed by {waiting_peers}",
            keys.configuration_generation
        );
    }
    text
}

/// Formats a duration in its two largest units.
pub(super) fn format_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys_outside_rotation() -> Keys {
        Keys {
            current_key: 1,
            current_since_unix_s: 1_000_000,
            rotation_phase: KeyPhase::Steady,
            configuration_generation: 7,
            pending_peers: Vec::new(),
            min_key_age_s: 86_400,
            rotation_interval_s: 0,
        }
    }

    fn format_keys(keys: &Keys, key_age_s: u64) -> String {
        format_key_status(keys, Duration::from_secs(1_000_000 + key_age_s))
    }

    #[test]
    fn keys_are_formatted_outside_a_rotation() {
        assert_eq!(
            format_keys(&keys_outside_rotation(), 59),
            "key 1 stamps, for 59 s now\n  rotation   by `coreward keys rotate`, not within 23 h 59 min\n"
        );
        assert_eq!(
            format_keys(&keys_outside_rotation(), 90_000),
            "key 1 stamps, for 1 d 1 h now\n  rotation   by `coreward keys rotate`\n"
        );
        let scheduled_keys = Keys { rotation_interval_s: 604_800, ..keys_outside_rotation() };
        assert_eq!(
            format_keys(&scheduled_keys, 604_700),
            "key 1 stamps, for 6 d 23 h now\n  rotation   in 1 min 40 s\n"
        );
        let unconfirmed_keys = Keys { pending_peers: vec!["the agent of s3".into()], ..scheduled_keys };
        assert_eq!(
            format_keys(&unconfirmed_keys, 604_801),
            "key 1 stamps, for 7 d 0 h now\n  rotation   due now\n  ! configuration 7, which brought the keys, is not \
             confirmed by the agent of s3\n"
        );
    }

    #[test]
    fn unfinished_rotation_lists_peers_without_the_next_key() {
        let announced_keys = Keys {
            rotation_phase: KeyPhase::Announced,
            pending_peers: vec!["load balancer lb2".into(), "the agent of s3".into()],
            ..keys_outside_rotation()
        };
        assert_eq!(
            format_keys(&announced_keys, 7200),
            "key 1 stamps, for 2 h 0 min now\n  rotation   the next key (configuration 7) waits for load balancer lb2, \
             the agent of s3\n"
        );
        let confirmed_keys = Keys { pending_peers: Vec::new(), ..announced_keys };
        assert!(format_keys(&confirmed_keys, 0).ends_with("the next key is everywhere, and about to stamp\n"));
    }
}
