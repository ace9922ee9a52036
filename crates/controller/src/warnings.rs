//! Faults of the controller's own store.

use super::Controller;

impl Controller {
    /// Records a load balancer's active configuration when its session begins. Logs a warning if the store's
    /// configuration is older.
    pub fn record_active_configuration(&mut self, session: u64, generation: u64) {
        if let Some(name) = self.load_balancers.record_configuration_in_force(session, generation, &self.fleet) {
            tracing::warn!(
                event = "store-outdated",
                load_balancer = name,
                generation,
                stored_generation = self.fleet.generation,
                "the load balancer has a newer configuration than the store, and keeps it: restore the store's newest \
                 backup"
            );
        }
    }

    pub fn fleet_store_warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if !self.fleet.has_document() {
            warnings.push(
                "the store has no document: load balancers and agents keep what they have in force; expected the store \
                 of before (`store`, `etcd`), or `coreward apply FILE`"
                    .to_owned(),
            );
        }
        let newer_configurations = self.load_balancers.configurations_newer_than_store(self.fleet.document.generation);
        warnings.extend(newer_configurations.map(|(name, generation)| {
            format!(
                "load balancer {name} had configuration {generation} in force, and the store has {}: expected the \
                 newest copy of the store, or `coreward apply FILE` if this one is right",
                self.fleet.generation
            )
        }));
        warnings
    }

    pub fn is_store_outdated(&self) -> bool {
        self.load_balancers.configurations_newer_than_store(self.fleet.document.generation).next().is_some()
    }
}
