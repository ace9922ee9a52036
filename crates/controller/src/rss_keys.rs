//! One copy of each RSS key that servers report: a table compares the keys of all its servers, and copies of one key are found
//! equal without a look at them.

use std::collections::HashSet;

use coreward_model::rss::RssKey;

/// A fleet has a few. Somebody who reports a new one each time fills no memory.
const MAX_KEYS: usize = 256;

/// The keys that were reported lately.
#[derive(Debug, Default)]
pub struct RssKeys(HashSet<RssKey>);

impl RssKeys {
    /// The same key: a copy of the one that was reported first.
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
