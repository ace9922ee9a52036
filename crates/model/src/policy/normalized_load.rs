//! Loads that make unequal cores comparable.
//!
//! Cores are filled up to a target load. If all cores are alike, the target is the mean load, and the least loaded core
//! is the furthest below it. A server of twice the weight should be twice as loaded. A core of twice the speed takes
//! two connections for the rise that one connection causes at a usual core. The data plane adds the same cost per
//! connection to any core. So the load in the table is the mean - speed x (target load of the core - load of the core),
//! where the product is the missing work, in work of a usual core.

use super::{ServerLoadClass, ServerPool};
use crate::statistics::mean;

pub struct NormalizedLoad {
    mean_load: f64,
    /// Constant that is added to each ranking value, so that no value is below 0.
    ranking_value_offset: f64,
    mean_weight: f64,
    mean_speed: f64,
    has_uniform_servers: bool,
}

impl NormalizedLoad {
    pub fn for_pool(pool: &ServerPool) -> Self {
        let is_uniform = pool.pool_totals().has_uniform_servers;
        let mut normalized_load = Self {
            mean_load: pool.neutral_load(),
            ranking_value_offset: 0.0,
            mean_weight: 1.0,
            mean_speed: 1.0,
            has_uniform_servers: is_uniform,
        };
        if !is_uniform {
            let classes: Vec<ServerLoadClass> = pool.eligible_servers().map(|server| server.server_class()).collect();
            let weights: Vec<f64> = classes.iter().map(|class| f64::from(class.weight.get())).collect();
            let speeds: Vec<f64> = classes.iter().map(|class| class.relative_core_speed).collect();
            normalized_load.mean_weight = mean(&weights).unwrap_or(1.0);
            normalized_load.mean_speed = mean(&speeds).unwrap_or(1.0);
            let lowest_value =
                classes.iter().map(|class| normalized_load.core_ranking_value(*class, 0.0)).fold(0.0, f64::min);
            normalized_load.ranking_value_offset = -lowest_value;
        }
        normalized_load
    }

    /// Returns the value by which cores are compared, for a core of class `class` with load `load`. Within a class, the
    /// value never decreases with the load.
    pub fn core_ranking_value(&self, class: ServerLoadClass, load: f64) -> f64 {
        if self.has_uniform_servers {
            return load;
        }
        self.ranking_value_for_target_load(self.target_load_and_relative_speed(class), load)
    }

    /// Returns the value of [`NormalizedLoad::core_ranking_value`] if not all servers are alike. The first argument is
    /// the result of [`NormalizedLoad::target_load_and_relative_speed`] for the core's class.
    pub fn ranking_value_for_target_load(&self, (target_load, speed): (f64, f64), load: f64) -> f64 {
        self.ranking_value_offset + self.mean_load - speed * (target_load - load)
    }

    pub fn has_uniform_servers(&self) -> bool {
        self.has_uniform_servers
    }

    /// Returns the target load of the cores of a class, and their speed relative to the mean speed.
    pub fn target_load_and_relative_speed(&self, class: ServerLoadClass) -> (f64, f64) {
        if self.has_uniform_servers {
            return (self.mean_load, 1.0);
        }
        (self.mean_load * f64::from(class.weight.get()) / self.mean_weight, class.relative_core_speed / self.mean_speed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{PoolServer, ServerCapacity, ServerWeight};

    fn build_pool_server(id: u64, load: f64, weight: u64, capacity: Option<f64>) -> PoolServer {
        PoolServer {
            loads: Some(vec![load; 2].into()),
            weight: ServerWeight::new(weight).unwrap(),
            capacity: capacity.map(|capacity| ServerCapacity::new(capacity).unwrap()),
            ..PoolServer::new(id.try_into().unwrap())
        }
    }

    fn core_ranking_values(servers: &[PoolServer]) -> Vec<f64> {
        let pool = ServerPool::new(servers.to_vec(), 1);
        let normalized_load = NormalizedLoad::for_pool(&pool);
        servers
            .iter()
            .map(|server| normalized_load.core_ranking_value(server.server_class(), server.mean_load(0.0)))
            .collect()
    }

    #[test]
    fn ranking_value_of_equal_cores_is_their_load() {
        assert_eq!(
            core_ranking_values(&[build_pool_server(1, 0.3, 5, None), build_pool_server(2, 0.7, 5, None)]),
            [0.3, 0.7]
        );
        assert_eq!(
            core_ranking_values(&[build_pool_server(1, 0.3, 1, Some(4.0)), build_pool_server(2, 0.7, 1, Some(4.0))]),
            [0.3, 0.7]
        );
    }

    #[test]
    fn ranking_values_are_equal_at_loads_proportional_to_weights() {
        // With mean 0.4 and weights 1 and 3, the levels are 0.2 and 0.6.
        let values = core_ranking_values(&[build_pool_server(1, 0.2, 1, None), build_pool_server(2, 0.6, 3, None)]);
        assert!((values[0] - values[1]).abs() < 1e-9, "{values:?}");
    }

    #[test]
    fn core_of_twice_the_speed_can_take_twice_the_work() {
        let servers = [
            build_pool_server(1, 0.4, 1, Some(2.0)),
            build_pool_server(2, 0.4, 1, Some(4.0)),
            build_pool_server(3, 0.7, 1, Some(2.0)),
        ];
        let values = core_ranking_values(&servers);
        let pool = ServerPool::new(servers.to_vec(), 1);
        let normalized_load = NormalizedLoad::for_pool(&pool);
        assert!(values[1] < values[0] && values[0] < values[2], "{values:?}");
        let missing_work = |server: &PoolServer| {
            let (level, speed) = normalized_load.target_load_and_relative_speed(server.server_class());
            speed * (level - 0.4)
        };
        assert!((missing_work(&servers[1]) - 2.0 * missing_work(&servers[0])).abs() < 1e-9);
        assert!(values.iter().all(|value| *value >= 0.0));
    }
}
