//! Comparable loads of unequal cores.
//!
//! Cores are filled to a level. If all are alike, that level is the mean load, and the least loaded core is the
//! furthest below it. A server of twice the weight should be twice as loaded. A core of twice the speed takes two
//! connections for the rise that one connection causes at a usual core. The data plane adds the same cost per
//! connection to any core. So the load in the table is the mean - speed x (level of the core - load of the core): the
//! missing work, in work of a usual core.

use super::{Pool, ServerClass};
use crate::statistics::mean;

pub struct NormalizedLoad {
    mean: f64,
    /// Constant that is added to each compared value, so that none is below 0.
    offset: f64,
    mean_weight: f64,
    mean_speed: f64,
    is_uniform: bool,
}

impl NormalizedLoad {
    pub fn of(pool: &Pool) -> Self {
        let alike = pool.totals().is_uniform;
        let mut levels =
            Self { mean: pool.neutral_load(), offset: 0.0, mean_weight: 1.0, mean_speed: 1.0, is_uniform: alike };
        if !alike {
            let classes: Vec<ServerClass> = pool.eligible().map(|server| server.class()).collect();
            let weights: Vec<f64> = classes.iter().map(|class| f64::from(class.weight.get())).collect();
            let speeds: Vec<f64> = classes.iter().map(|class| class.speed).collect();
            levels.mean_weight = mean(&weights).unwrap_or(1.0);
            levels.mean_speed = mean(&speeds).unwrap_or(1.0);
            let lowest = classes.iter().map(|class| levels.normalize(*class, 0.0)).fold(0.0, f64::min);
            levels.offset = -lowest;
        }
        levels
    }

    /// Returns the compared value of a core of a class with this load. Within a class the value never falls where loads
    /// rise.
    pub fn normalize(&self, class: ServerClass, load: f64) -> f64 {
        if self.is_uniform {
            return load;
        }
        self.compared_at(self.level(class), load)
    }

    /// Returns the result of [`NormalizedLoad::normalize`] if cores are not all alike, and [`NormalizedLoad::level`] of
    /// the class is known.
    pub fn compared_at(&self, (level, speed): (f64, f64), load: f64) -> f64 {
        self.offset + self.mean - speed * (level - load)
    }

    /// Returns whether all cores have the same level and speed.
    pub fn is_uniform(&self) -> bool {
        self.is_uniform
    }

    /// Returns the level of the cores of a class, and their speed relative to the mean speed.
    pub fn level(&self, class: ServerClass) -> (f64, f64) {
        if self.is_uniform {
            return (self.mean, 1.0);
        }
        (self.mean * f64::from(class.weight.get()) / self.mean_weight, class.speed / self.mean_speed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Capacity, PoolServer, Weight};

    fn server(id: u64, load: f64, weight: u64, capacity: Option<f64>) -> PoolServer {
        PoolServer {
            loads: Some(vec![load; 2].into()),
            weight: Weight::new(weight).unwrap(),
            capacity: capacity.map(|capacity| Capacity::new(capacity).unwrap()),
            ..PoolServer::new(id.try_into().unwrap())
        }
    }

    fn normalize(servers: &[PoolServer]) -> Vec<f64> {
        let pool = Pool::new(servers.to_vec(), 1);
        let levels = NormalizedLoad::of(&pool);
        servers.iter().map(|server| levels.normalize(server.class(), server.mean_load(0.0))).collect()
    }

    #[test]
    fn equal_cores_are_compared_by_load() {
        assert_eq!(normalize(&[server(1, 0.3, 5, None), server(2, 0.7, 5, None)]), [0.3, 0.7]);
        assert_eq!(normalize(&[server(1, 0.3, 1, Some(4.0)), server(2, 0.7, 1, Some(4.0))]), [0.3, 0.7]);
    }

    #[test]
    fn heavy_server_is_level_at_a_higher_load() {
        // Mean 0.4, weights 1 and 3: levels 0.2 and 0.6.
        let both = normalize(&[server(1, 0.2, 1, None), server(2, 0.6, 3, None)]);
        assert!((both[0] - both[1]).abs() < 1e-9, "{both:?}");
    }

    #[test]
    fn faster_core_with_an_equal_deficit_takes_more() {
        let servers = [server(1, 0.4, 1, Some(2.0)), server(2, 0.4, 1, Some(4.0)), server(3, 0.7, 1, Some(2.0))];
        let of = normalize(&servers);
        let pool = Pool::new(servers.to_vec(), 1);
        let levels = NormalizedLoad::of(&pool);
        assert!(of[1] < of[0] && of[0] < of[2], "{of:?}");
        let missing = |server: &PoolServer| {
            let (level, speed) = levels.level(server.class());
            speed * (level - 0.4)
        };
        assert!((missing(&servers[1]) - 2.0 * missing(&servers[0])).abs() < 1e-9);
        assert!(of.iter().all(|compared| *compared >= 0.0));
    }
}
