//! RSS keys that are stored only once, so that tables compare keys by address and not by their bytes.

use std::collections::HashSet;

use coreward_model::rss::RssKey;

/// Maximum number of stored RSS keys. A fleet has few keys, but an agent that always reports new keys must not exhaust
/// the memory.
const MAX_INTERNED_RSS_KEYS: usize = 256;

/// RSS keys that were reported recently. Equal keys share their memory.
#[derive(Debug, Default)]
pub struct InternedRssKeys(HashSet<RssKey>);

impl InternedRssKeys {
    /// Returns a key equal to `key` that shares its memory with earlier copies.
    pub fn intern(&mut self, key: RssKey) -> RssKey {
        if let Some(interned_key) = self.0.get(&key) {
            return interned_key.clone();
        }
        if self.0.len() == MAX_INTERNED_RSS_KEYS {
            self.0.clear();
        }
        self.0.insert(key.clone());
        key
    }
}
