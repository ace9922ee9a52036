//! Assignment of listening sockets to receive queues, without I/O.

use coreward_dataplane::listeners::ServiceSocket;

use crate::config::ConnectionSteeringMode;

/// Returns the index in `listeners` of the listener of each queue, or `None` for a queue whose workers the kernel
/// selects. `cpu_of_queue` contains the CPU that serves each queue.
pub fn assign_listeners_to_queues(
    steering_mode: ConnectionSteeringMode,
    listeners: &[ServiceSocket],
    cpu_of_queue: &[usize],
) -> Vec<Option<usize>> {
    match steering_mode {
        ConnectionSteeringMode::Off => vec![None; cpu_of_queue.len()],
        ConnectionSteeringMode::Order => assign_listeners_in_order(listeners, cpu_of_queue.len()),
        ConnectionSteeringMode::Affinity => {
            cpu_of_queue.iter().map(|cpu| find_worker_pinned_to(listeners, *cpu)).collect()
        }
    }
}

/// Assigns the k-th socket to queue k. A master process opens the sockets of its workers one after the other, so that
/// the order of descriptors is the order of workers. A respawned worker inherits the same socket. Among equal
/// descriptors of separate processes, the lower pid comes first.
fn assign_listeners_in_order(listeners: &[ServiceSocket], queue_count: usize) -> Vec<Option<usize>> {
    let mut listener_indices: Vec<usize> = (0..listeners.len()).collect();
    listener_indices.sort_by_key(|position| (listeners[*position].file_descriptor, listeners[*position].pid));
    (0..queue_count).map(|queue| listener_indices.get(queue % listener_indices.len().max(1)).copied()).collect()
}

/// Returns the index of the worker that may run on the CPU `cpu` and on the fewest other CPUs. Workers that are not
/// pinned are excluded, because steering to them would have no benefit.
fn find_worker_pinned_to(listeners: &[ServiceSocket], cpu: usize) -> Option<usize> {
    let is_pinned_to_cpu = |listener: &&(usize, &ServiceSocket)| {
        listener.1.cpu_affinity.contains(&cpu) && listener.1.cpu_affinity.len() <= MAX_CPUS_OF_PINNED_WORKER
    };
    let indexed_listeners: Vec<(usize, &ServiceSocket)> = listeners.iter().enumerate().collect();
    let best_candidate = indexed_listeners
        .iter()
        .filter(is_pinned_to_cpu)
        .min_by_key(|(position, listener)| (listener.cpu_affinity.len(), *position));
    best_candidate.map(|(position, _)| *position)
}

/// Maximum number of CPUs of a worker that counts as pinned. Two CPUs are a core and its sibling hardware thread.
pub const MAX_CPUS_OF_PINNED_WORKER: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn build_listener(pid: i32, descriptor: i32, cpus: &[usize]) -> ServiceSocket {
        ServiceSocket {
            inode: pid as u64,
            file_descriptor: descriptor,
            pid,
            cpu_affinity: cpus.iter().copied().collect(),
        }
    }

    #[test]
    fn workers_are_assigned_by_descriptor_after_a_respawn() {
        let listeners =
            [build_listener(30, 6, &[0, 1]), build_listener(77, 7, &[0, 1]), build_listener(32, 8, &[0, 1])];
        assert_eq!(
            assign_listeners_to_queues(ConnectionSteeringMode::Order, &listeners, &[0, 1, 2]),
            [Some(0), Some(1), Some(2)]
        );
        // With few workers, each serves several queues. Without workers, the kernel chooses.
        assert_eq!(
            assign_listeners_to_queues(ConnectionSteeringMode::Order, &listeners[..2], &[0; 4]),
            [Some(0), Some(1), Some(0), Some(1)]
        );
        assert_eq!(assign_listeners_to_queues(ConnectionSteeringMode::Order, &[], &[0; 2]), [None, None]);
    }

    #[test]
    fn affinity_steering_prefers_worker_with_fewest_cpus() {
        let listeners =
            [build_listener(1, 6, &[0, 1]), build_listener(2, 7, &[1]), build_listener(3, 8, &[0, 1, 2, 3])];
        assert_eq!(
            assign_listeners_to_queues(ConnectionSteeringMode::Affinity, &listeners, &[0, 1, 2]),
            [Some(0), Some(1), None]
        );
        assert_eq!(assign_listeners_to_queues(ConnectionSteeringMode::Off, &listeners, &[0, 1]), [None, None]);
    }
}
