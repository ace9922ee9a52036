//! Table that maps buckets to servers and stores its own history. When a connection ends, the history shows whether it
//! was broken. A change of a bucket therefore need not visit the open connections.

use super::connections::OpenConnection;
use super::simulated_nanoseconds::Nanoseconds;

/// Server that a bucket's packets reach, directly or by daisy chaining.
#[derive(Debug, Clone, Copy)]
struct BucketServer {
    server: u16,
    /// Number of the table change that made the server reachable. Connections from before it started on another server.
    reachable_since_change: u32,
}

#[derive(Debug, Clone, Copy)]
struct BucketEntry {
    current: BucketServer,
    /// Previous server of the bucket. With daisy chaining, `current` forwards packets of unknown connections to it.
    previous: BucketServer,
}

/// Server that a bucket's packets no longer reach, with the numbers of the table changes between which they reached it.
#[derive(Debug, Clone, Copy)]
struct BucketEviction {
    server: u16,
    reachable_since_change: u32,
    reachable_until_change: u32,
    evicted_at: Nanoseconds,
}

const NO_SERVER: BucketServer = BucketServer { server: u16::MAX, reachable_since_change: u32::MAX };

/// Returns the bucket of a hash. Only the lower 32 bits of the hash are used.
pub fn hash_to_bucket(hash: u64, bucket_count: usize) -> usize {
    // Multiply and shift (Lemire 2019) makes all buckets equally likely, whatever their number.
    (((hash & 0xffff_ffff) * bucket_count as u64) >> 32) as usize
}

/// Table that maps each bucket to a server. All load balancers have the same table.
#[derive(Debug)]
pub struct BucketTable {
    buckets: Vec<BucketEntry>,
    uses_daisy_chaining: bool,
    /// Number of table changes so far. Each connection stores this number as it was at the connection's first packet.
    table_change_count: u32,
    last_change_at: Nanoseconds,
    evictions_by_bucket: Option<Vec<Vec<BucketEviction>>>,
}

impl BucketTable {
    /// Returns a table whose buckets have no server yet.
    pub fn new(bucket_count: usize, uses_daisy_chaining: bool, keeps_history: bool) -> Self {
        Self {
            buckets: vec![BucketEntry { current: NO_SERVER, previous: NO_SERVER }; bucket_count],
            uses_daisy_chaining,
            table_change_count: 0,
            last_change_at: 0,
            evictions_by_bucket: keeps_history.then(|| vec![Vec::new(); bucket_count]),
        }
    }

    pub fn len(&self) -> usize {
        self.buckets.len()
    }

    pub fn bucket_of_connection(&self, identity: u64) -> usize {
        hash_to_bucket(identity, self.buckets.len())
    }

    pub fn current_server(&self, bucket: usize) -> u16 {
        self.buckets[bucket].current.server
    }

    /// Returns the number of the last table change. A connection that begins now stores this number.
    pub fn last_change_number(&self) -> u64 {
        self.table_change_count.into()
    }

    /// Starts a table change, to which all assignments belong until the next call of this function.
    pub fn begin_table_change(&mut self, now: Nanoseconds) {
        self.table_change_count += 1;
        self.last_change_at = now;
    }

    /// Assigns a bucket to a server, as part of the table change that was begun last.
    pub fn assign_bucket(&mut self, bucket: usize, server: u16) {
        let entry = &mut self.buckets[bucket];
        if entry.current.server == server {
            return;
        }
        let evicted_server = match (self.uses_daisy_chaining, entry.previous.server == server) {
            // The bucket returns to its previous server, so both servers stay reachable.
            (true, true) => {
                std::mem::swap(&mut entry.current, &mut entry.previous);
                return;
            }
            (true, false) => std::mem::replace(&mut entry.previous, entry.current),
            (false, _) => entry.current,
        };
        entry.current = BucketServer { server, reachable_since_change: self.table_change_count };
        if let Some(history) = &mut self.evictions_by_bucket
            && evicted_server.server != NO_SERVER.server
        {
            let (server, since_change) = (evicted_server.server, evicted_server.reachable_since_change);
            history[bucket].push(BucketEviction {
                server,
                reachable_since_change: since_change,
                reachable_until_change: self.table_change_count,
                evicted_at: self.last_change_at,
            });
        }
    }

    /// Implements [`super::balancer::LoadBalancerSet::first_break_time`]. The connection's stored state must be the
    /// [`BucketTable::last_change_number`] at its first packet.
    pub fn first_break_time(&self, connection: &OpenConnection, now: Nanoseconds) -> Option<Nanoseconds> {
        let bucket = self.bucket_of_connection(connection.identity);
        let first_packet_change_number = connection.stored_state as u32;
        let is_reachable_since_first_packet = |resident: &BucketServer| {
            resident.server == connection.server && resident.reachable_since_change <= first_packet_change_number
        };
        let BucketEntry { current, previous } = &self.buckets[bucket];
        if is_reachable_since_first_packet(current) || is_reachable_since_first_packet(previous) {
            return None;
        }
        let Some(history) = &self.evictions_by_bucket else { return Some(now) };
        let eviction = history[bucket].iter().find(|eviction| {
            eviction.server == connection.server
                && eviction.reachable_since_change <= first_packet_change_number
                && first_packet_change_number < eviction.reachable_until_change
        });
        Some(eviction.expect("what reaches a server no longer was evicted").evicted_at)
    }
}
