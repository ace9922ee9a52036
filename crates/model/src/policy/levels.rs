//! What loads of unequal cores are compared by.
//!
//! Cores are filled to a level. Where all are alike, that level is the mean load, and the least loaded core is what is furthest
//! below. A server of twice the weight should be twice as loaded; a core of twice the speed takes two connections to rise as
//! far as another does by one. The data plane adds the same cost for every connection, to any core. So the load that it is
//! told is the mean - speed x (the core's own level - its load): what is missing to the level, in the work of a usual core.

use super::{Pool, PoolServer};
use crate::statistics::mean;

/// The levels of a pool.
pub struct Levels {
    mean: f64,
    /// Added to all, so that none is below 0.
    lift: f64,
    mean_weight: f64,
    mean_speed: f64,
    alike: bool,
}

impl Levels {
    /// Of the eligible servers.
    pub fn of(pool: &Pool) -> Self {
        let weights: Vec<f64> = pool.eligible().map(|server| f64::from(server.weight.get())).collect();
        let speeds: Vec<f64> = pool.eligible().map(speed).collect();
        let all_equal = |values: &[f64]| values.windows(2).all(|pair| pair[0] == pair[1]);
        let mut levels = Self {
            mean: pool.neutral_load(),
            lift: 0.0,
            mean_weight: mean(&weights).unwrap_or(1.0),
            mean_speed: mean(&speeds).unwrap_or(1.0),
            alike: all_equal(&weights) && all_equal(&speeds),
        };
        if !levels.alike {
            let lowest = pool.eligible().map(|server| levels.compared(server, 0.0)).fold(0.0, f64::min);
            levels.lift = -lowest;
        }
        levels
    }

    /// What a core of the server with that load is compared by.
    pub fn compared(&self, server: &PoolServer, load: f64) -> f64 {
        if self.alike {
            return load;
        }
        self.lift + self.mean - self.missing(server, load)
    }

    /// What the core is below its level, in the work of a usual core; negative above it.
    pub fn missing(&self, server: &PoolServer, load: f64) -> f64 {
        if self.alike {
            return self.mean - load;
        }
        let level = self.mean * f64::from(server.weight.get()) / self.mean_weight;
        speed(server) / self.mean_speed * (level - load)
    }
}

/// How fast one core is: what the operator says of all of them, by their number.
fn speed(server: &PoolServer) -> f64 {
    match (server.capacity, server.core_count()) {
        (Some(capacity), Some(cores)) => capacity.get() / f64::from(cores.max(1)),
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Capacity, Weight};

    fn server(id: u64, load: f64, weight: u64, capacity: Option<f64>) -> PoolServer {
        PoolServer {
            loads: Some(vec![load; 2]),
            weight: Weight::new(weight).unwrap(),
            capacity: capacity.map(|capacity| Capacity::new(capacity).unwrap()),
            ..PoolServer::new(id.try_into().unwrap())
        }
    }

    fn compared(servers: &[PoolServer]) -> Vec<f64> {
        let pool = Pool::new(servers.to_vec(), 1);
        let levels = Levels::of(&pool);
        servers.iter().map(|server| levels.compared(server, server.loads.as_ref().unwrap()[0])).collect()
    }

    #[test]
    fn cores_that_are_alike_are_compared_by_load() {
        assert_eq!(compared(&[server(1, 0.3, 5, None), server(2, 0.7, 5, None)]), [0.3, 0.7]);
        assert_eq!(compared(&[server(1, 0.3, 1, Some(4.0)), server(2, 0.7, 1, Some(4.0))]), [0.3, 0.7]);
    }

    #[test]
    fn a_heavy_server_is_level_at_a_higher_load() {
        // Mean 0.4, weights 1 and 3: levels 0.2 and 0.6.
        let both = compared(&[server(1, 0.2, 1, None), server(2, 0.6, 3, None)]);
        assert!((both[0] - both[1]).abs() < 1e-9, "{both:?}");
    }

    #[test]
    fn a_fast_core_that_lacks_as_much_takes_more() {
        // Both lack 0.1 to the mean but for a third one above it; the fast one's lack is twice the work.
        let servers = [server(1, 0.4, 1, Some(2.0)), server(2, 0.4, 1, Some(4.0)), server(3, 0.7, 1, Some(2.0))];
        let of = compared(&servers);
        let pool = Pool::new(servers.to_vec(), 1);
        let levels = Levels::of(&pool);
        assert!(of[1] < of[0] && of[0] < of[2], "{of:?}");
        assert!((levels.missing(&servers[1], 0.4) - 2.0 * levels.missing(&servers[0], 0.4)).abs() < 1e-9);
        assert!(of.iter().all(|compared| *compared >= 0.0));
    }
}
