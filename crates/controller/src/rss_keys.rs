//! One shared copy of each reported RSS key: a table compares the keys of all its servers, and shared copies compare
//! without reading their bytes.

use std::collections::HashSet;

use coreward_model::rss::RssKey;

/// A fleet has a few. An agent that reports a new one each time must not fill the memory.
const MAX_KEYS: usize = 256;

/// Recently reported keys.
#[derive(Debug, Default)]
pub struct RssKeys(HashSet<RssKey>);

impl RssKeys {
    /// Returns the first copy of the same key.
    pub fn shared(&mut self, key: RssKey) -> RssKey {
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
