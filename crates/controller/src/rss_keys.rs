//! One shared copy of each reported RSS key, so that tables compare keys by address and not by their bytes.

use std::collections::HashSet;

use coreward_model::rss::RssKey;

/// Limit of keys: a fleet has a few. An agent that always reports new keys must not exhaust the memory.
const MAX_KEYS: usize = 256;

/// Recently reported keys.
#[derive(Debug, Default)]
pub struct RssKeys(HashSet<RssKey>);

impl RssKeys {
    /// Returns the first copy of the same key.
    pub fn intern(&mut self, key: RssKey) -> RssKey {
        if let Some(known) = self.0.get(&key) {
            return known.clone();
        }
        if self.0.len() == MAX_KEYS {
            self.0.clear();
        }
        self.0.insert(key.clone());
        key
    }
}
