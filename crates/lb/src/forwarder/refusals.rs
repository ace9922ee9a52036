//! What of the controller's updates cannot be used here: the controller is told, and what was in force before stays.

use std::collections::BTreeMap;

use coreward_wire::v1::RefusedUpdate;

/// By service (empty: all of an update), and whether it is a table.
#[derive(Debug, Default)]
pub struct Refusals(BTreeMap<(String, bool), RefusedUpdate>);

impl Refusals {
    /// This cannot be used.
    pub fn refuse(&mut self, refused: RefusedUpdate) {
        let what = (refused.service.clone(), refused.table);
        if self.0.get(&what) != Some(&refused) {
            let RefusedUpdate { service, generation, reason, table } = &refused;
            let what = if *table { "table" } else { "configuration" };
            tracing::error!("refused: {what} generation={generation} service={service:?}: {reason}");
        }
        self.0.insert(what, refused);
    }

    /// The newest one of this can.
    pub fn accept(&mut self, service: &str, table: bool) {
        self.0.remove(&(service.to_owned(), table));
    }

    /// Another stream, or a whole configuration, begins anew; tables go on where `tables`.
    pub fn forget(&mut self, tables: bool) {
        self.0.retain(|(_, table), _| tables && *table);
    }

    /// For the controller.
    pub fn list(&self) -> Vec<RefusedUpdate> {
        self.0.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_holds_until_the_next_of_its_kind() {
        let refused = |service: &str, generation, table| RefusedUpdate {
            service: service.into(),
            generation,
            reason: "unknown".into(),
            table,
        };
        let mut refusals = Refusals::default();
        refusals.refuse(refused("web", 3, false));
        refusals.refuse(refused("web", 8, true));
        refusals.refuse(refused("web", 9, true));
        refusals.refuse(refused("dns", 3, false));
        assert_eq!(refusals.list(), [refused("dns", 3, false), refused("web", 3, false), refused("web", 9, true)]);
        refusals.accept("web", false);
        assert_eq!(refusals.list(), [refused("dns", 3, false), refused("web", 9, true)]);
        refusals.forget(true);
        assert_eq!(refusals.list(), [refused("web", 9, true)]);
        refusals.forget(false);
        assert_eq!(refusals.list(), []);
    }
}
