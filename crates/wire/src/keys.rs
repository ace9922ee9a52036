//! The fleet's cookie keys.

use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};

use crate::{WireError, v1};

impl From<CookieKey> for v1::CookieKey {
    fn from(key: CookieKey) -> Self {
        Self { k0: key.k0, k1: key.k1 }
    }
}

impl From<v1::CookieKey> for CookieKey {
    fn from(key: v1::CookieKey) -> Self {
        Self { k0: key.k0, k1: key.k1 }
    }
}

impl From<&FleetCookieKeys> for v1::FleetKeys {
    fn from(keys: &FleetCookieKeys) -> Self {
        let key = keys.keys.map(Into::into).to_vec();
        Self { key, current: keys.current_key_index.get() as u32 }
    }
}

impl TryFrom<&v1::FleetKeys> for FleetCookieKeys {
    type Error = WireError;

    fn try_from(message: &v1::FleetKeys) -> Result<Self, WireError> {
        let [first, second] = message.key.as_slice() else {
            return Err(WireError::new("key", format!("{} cookie keys: expected 2", message.key.len())));
        };
        let current_key_index = match message.current {
            0 => CookieKeyIndex::First,
            1 => CookieKeyIndex::Second,
            other => return Err(WireError::new("current", format!("key {other} is to stamp: expected 0 or 1"))),
        };
        Ok(Self { keys: [first, second].map(|key| (*key).into()), current_key_index })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_cookie_keys_round_trip_and_other_counts_are_rejected() {
        let keys = FleetCookieKeys {
            keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: u64::MAX }],
            current_key_index: CookieKeyIndex::Second,
        };
        let mut message = v1::FleetKeys::from(&keys);
        assert_eq!(FleetCookieKeys::try_from(&message), Ok(keys));
        message.current = 2;
        assert_eq!(
            FleetCookieKeys::try_from(&message).unwrap_err().to_string(),
            "current: key 2 is to stamp: expected 0 or 1"
        );
        message.key.pop();
        assert_eq!(FleetCookieKeys::try_from(&message).unwrap_err().to_string(), "key: 1 cookie keys: expected 2");
    }
}
