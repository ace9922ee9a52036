//! Imbalance (Cheetah, NSDI'20, Sect. 2.1; Maglev, NSDI'16): connections of the most loaded server divided by the mean
//! of all servers, averaged over time.

use super::clock::Nanoseconds;

/// Tracker of the imbalance of the pool, which processes every change in constant time.
#[derive(Debug)]
pub struct Imbalance {
    /// Number of servers for each number of connections.
    server_histogram: Vec<u32>,
    servers: u64,
    connections: u64,
    max_connections: usize,
    updated_at: Nanoseconds,
    /// Integral of the imbalance (max/mean) over the time with connections, and that time.
    weighted_time: f64,
    measured_time: f64,
}

impl Imbalance {
    /// Returns a tracker without servers, which measures from `start` on.
    pub fn from(start: Nanoseconds) -> Self {
        Self {
            server_histogram: vec![0],
            servers: 0,
            connections: 0,
            max_connections: 0,
            updated_at: start,
            weighted_time: 0.0,
            measured_time: 0.0,
        }
    }

    /// Adds the time until `now`, during which the connection counts were the current ones.
    pub fn advance(&mut self, now: Nanoseconds) {
        if now <= self.updated_at {
            return;
        }
        if self.connections > 0 {
            let elapsed = (now - self.updated_at) as f64;
            self.weighted_time += self.current() * elapsed;
            self.measured_time += elapsed;
        }
        self.updated_at = now;
    }

    /// Returns the current imbalance (max/mean); there must be connections.
    fn current(&self) -> f64 {
        (self.max_connections as u64 * self.servers) as f64 / self.connections as f64
    }

    /// Returns the imbalance (max/mean) as an average over the time with connections; 1.0 without any connection.
    pub fn average(&self) -> f64 {
        if self.measured_time > 0.0 { self.weighted_time / self.measured_time } else { 1.0 }
    }

    pub fn add_server(&mut self, connections: u32) {
        self.servers += 1;
        self.connections += u64::from(connections);
        self.insert(connections as usize);
    }

    /// Removes a server that has `connections` connections.
    pub fn remove_server(&mut self, connections: u32) {
        self.servers -= 1;
        self.connections -= u64::from(connections);
        self.remove(connections as usize);
    }

    /// Adds a connection to a server that had `before` connections.
    pub fn connection_opened(&mut self, before: u32) {
        self.connections += 1;
        self.insert(before as usize + 1);
        self.remove(before as usize);
    }

    /// Removes a connection from a server that had `before` connections.
    pub fn connection_closed(&mut self, before: u32) {
        self.connections -= 1;
        self.insert(before as usize - 1);
        self.remove(before as usize);
    }

    fn insert(&mut self, connections: usize) {
        if connections >= self.server_histogram.len() {
            self.server_histogram.resize(connections + 1, 0);
        }
        self.server_histogram[connections] += 1;
        self.max_connections = self.max_connections.max(connections);
    }

    fn remove(&mut self, connections: usize) {
        self.server_histogram[connections] -= 1;
        while self.max_connections > 0 && self.server_histogram[self.max_connections] == 0 {
            self.max_connections -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use coreward_model::rss::{seeded_rng, uniform_below};

    use super::*;

    #[test]
    fn cached_counts_equal_a_full_count() {
        let mut rng = seeded_rng(1, 0);
        let mut imbalance = Imbalance::from(1_000);
        let mut counts: Vec<Option<u32>> = vec![None; 8];
        let (mut area, mut measured) = (0.0, 0.0);
        for step in 1..5_000u64 {
            let now = step * 10;
            let inside: Vec<u32> = counts.iter().flatten().copied().collect();
            if now > 1_000 && inside.iter().sum::<u32>() > 0 {
                let mean = f64::from(inside.iter().sum::<u32>()) / inside.len() as f64;
                area += f64::from(*inside.iter().max().unwrap()) / mean * 10.0;
                measured += 10.0;
            }
            imbalance.advance(now);
            let server = uniform_below(&mut rng, 8) as usize;
            match (&mut counts[server], uniform_below(&mut rng, 40)) {
                (count @ None, 0..4) => {
                    imbalance.add_server(server as u32);
                    *count = Some(server as u32);
                }
                (slot @ Some(_), 0) => imbalance.remove_server(slot.take().unwrap()),
                (Some(count), 1..20) if *count > 0 => {
                    imbalance.connection_closed(*count);
                    *count -= 1;
                }
                (Some(count), 20..) => {
                    imbalance.connection_opened(*count);
                    *count += 1;
                }
                _ => (),
            }
        }
        assert!((imbalance.average() - area / measured).abs() < 1e-9, "{} {}", imbalance.average(), area / measured);
        assert!(imbalance.average() > 1.2);
    }

    #[test]
    fn empty_pool_has_no_imbalance() {
        let mut imbalance = Imbalance::from(0);
        imbalance.add_server(0);
        imbalance.advance(100);
        assert_eq!(imbalance.average(), 1.0);
    }
}
