//! Imbalance of the servers, as in Cheetah (NSDI'20, Sect. 2.1) and Maglev (NSDI'16). It is the most loaded server's
//! number of connections divided by the mean, averaged over time.

use super::simulated_nanoseconds::Nanoseconds;

/// Tracker of the imbalance between the servers' connection counts. It processes every change in constant time.
#[derive(Debug)]
pub struct ServerImbalanceTracker {
    /// Histogram of the servers' connection counts: the number of servers with n connections at index n.
    servers_by_connection_count: Vec<u32>,
    server_count: u64,
    connection_count: u64,
    max_connections_per_server: usize,
    updated_at: Nanoseconds,
    /// Integral of the imbalance (max/mean) over `time_with_connections_ns`, the time with at least one connection
    /// (ns).
    imbalance_integral: f64,
    time_with_connections_ns: f64,
}

impl ServerImbalanceTracker {
    /// Returns a tracker without servers, which measures from the time `start` on.
    pub fn starting_at(start: Nanoseconds) -> Self {
        Self {
            servers_by_connection_count: vec![0],
            server_count: 0,
            connection_count: 0,
            max_connections_per_server: 0,
            updated_at: start,
            imbalance_integral: 0.0,
            time_with_connections_ns: 0.0,
        }
    }

    /// Adds the imbalance between the last update and `now` to the integral. The connection counts must not have
    /// changed.
    pub fn advance_to(&mut self, now: Nanoseconds) {
        if now <= self.updated_at {
            return;
        }
        if self.connection_count > 0 {
            let elapsed_ns = (now - self.updated_at) as f64;
            self.imbalance_integral += self.current_imbalance() * elapsed_ns;
            self.time_with_connections_ns += elapsed_ns;
        }
        self.updated_at = now;
    }

    /// Returns the current imbalance (max/mean). There must be at least one connection.
    fn current_imbalance(&self) -> f64 {
        (self.max_connections_per_server as u64 * self.server_count) as f64 / self.connection_count as f64
    }

    /// Returns the imbalance (max/mean), averaged over the time with connections, or 1.0 if there were none.
    pub fn average_imbalance(&self) -> f64 {
        if self.time_with_connections_ns > 0.0 { self.imbalance_integral / self.time_with_connections_ns } else { 1.0 }
    }

    pub fn add_server(&mut self, connection_count: u32) {
        self.server_count += 1;
        self.connection_count += u64::from(connection_count);
        self.add_to_histogram(connection_count as usize);
    }

    /// Removes a server that has the given number of connections.
    pub fn remove_server(&mut self, connection_count: u32) {
        self.server_count -= 1;
        self.connection_count -= u64::from(connection_count);
        self.remove_from_histogram(connection_count as usize);
    }

    /// Counts a new connection on a server that had `previous_connections` connections.
    pub fn add_connection(&mut self, previous_connections: u32) {
        self.connection_count += 1;
        self.add_to_histogram(previous_connections as usize + 1);
        self.remove_from_histogram(previous_connections as usize);
    }

    /// Removes a closed connection from a server that had `previous_connections` connections.
    pub fn remove_connection(&mut self, previous_connections: u32) {
        self.connection_count -= 1;
        self.add_to_histogram(previous_connections as usize - 1);
        self.remove_from_histogram(previous_connections as usize);
    }

    fn add_to_histogram(&mut self, connection_count: usize) {
        if connection_count >= self.servers_by_connection_count.len() {
            self.servers_by_connection_count.resize(connection_count + 1, 0);
        }
        self.servers_by_connection_count[connection_count] += 1;
        self.max_connections_per_server = self.max_connections_per_server.max(connection_count);
    }

    fn remove_from_histogram(&mut self, connection_count: usize) {
        self.servers_by_connection_count[connection_count] -= 1;
        while self.max_connections_per_server > 0
            && self.servers_by_connection_count[self.max_connections_per_server] == 0
        {
            self.max_connections_per_server -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use coreward_model::rss::{seeded_rng, uniform_below};

    use super::*;

    #[test]
    fn tracked_imbalance_equals_recomputed_imbalance() {
        let mut rng = seeded_rng(1, 0);
        let mut imbalance = ServerImbalanceTracker::starting_at(1_000);
        let mut connection_counts: Vec<Option<u32>> = vec![None; 8];
        let (mut imbalance_integral, mut measured_time) = (0.0, 0.0);
        for step in 1..5_000u64 {
            let now = step * 10;
            let pool_connection_counts: Vec<u32> = connection_counts.iter().flatten().copied().collect();
            if now > 1_000 && pool_connection_counts.iter().sum::<u32>() > 0 {
                let mean = f64::from(pool_connection_counts.iter().sum::<u32>()) / pool_connection_counts.len() as f64;
                imbalance_integral += f64::from(*pool_connection_counts.iter().max().unwrap()) / mean * 10.0;
                measured_time += 10.0;
            }
            imbalance.advance_to(now);
            let server = uniform_below(&mut rng, 8) as usize;
            match (&mut connection_counts[server], uniform_below(&mut rng, 40)) {
                (count @ None, 0..4) => {
                    imbalance.add_server(server as u32);
                    *count = Some(server as u32);
                }
                (slot @ Some(_), 0) => imbalance.remove_server(slot.take().unwrap()),
                (Some(count), 1..20) if *count > 0 => {
                    imbalance.remove_connection(*count);
                    *count -= 1;
                }
                (Some(count), 20..) => {
                    imbalance.add_connection(*count);
                    *count += 1;
                }
                _ => (),
            }
        }
        assert!(
            (imbalance.average_imbalance() - imbalance_integral / measured_time).abs() < 1e-9,
            "{} {}",
            imbalance.average_imbalance(),
            imbalance_integral / measured_time
        );
        assert!(imbalance.average_imbalance() > 1.2);
    }

    #[test]
    fn pool_without_connections_has_no_imbalance() {
        let mut imbalance = ServerImbalanceTracker::starting_at(0);
        imbalance.add_server(0);
        imbalance.advance_to(100);
        assert_eq!(imbalance.average_imbalance(), 1.0);
    }
}
