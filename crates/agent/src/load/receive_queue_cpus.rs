//! Finds the CPU that serves each receive queue, which is the CPU that handles the queue's interrupt.

use std::collections::BTreeMap;
use std::fs;

use crate::sysfs;

/// Returns the CPU of each of the first `receive_queue_count` queues. If the interrupt of queue `q` is unknown, as for
/// virtual devices, its CPU is `q` modulo the number of CPUs.
pub fn cpus_of_queues(interface: &str, receive_queue_count: u16) -> Vec<usize> {
    let cpu_count = std::thread::available_parallelism().map_or(1, usize::from);
    let interrupts_by_queue = receive_queue_interrupts(interface);
    let find_queue_cpu = |queue: u16| {
        interrupts_by_queue.get(&queue).and_then(|interrupt| interrupt.cpu).unwrap_or(usize::from(queue) % cpu_count)
    };
    (0..receive_queue_count).map(find_queue_cpu).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveQueueInterrupt {
    /// Interrupt number (IRQ) in /proc/interrupts.
    pub irq_number: u32,
    /// CPU that handles the interrupt, or `None` if /proc does not show it.
    pub cpu: Option<usize>,
}

/// Returns the interrupt of each receive queue of a device, as far as known. The map is empty for a virtual device.
pub fn receive_queue_interrupts(interface: &str) -> BTreeMap<u16, ReceiveQueueInterrupt> {
    let irq_by_queue = bus_device_name(interface).map_or_else(BTreeMap::new, |device| {
        irqs_by_receive_queue(&fs::read_to_string("/proc/interrupts").unwrap_or_default(), interface, &device)
    });
    irq_by_queue
        .into_iter()
        .map(|(queue, number)| (queue, ReceiveQueueInterrupt { irq_number: number, cpu: first_affinity_cpu(number) }))
        .collect()
}

/// Returns the name of a network device on its bus, which is a PCI address or `virtioN`.
fn bus_device_name(interface: &str) -> Option<String> {
    let device_path = fs::canonicalize(sysfs::network_device_directory(interface)?.join("device")).ok()?;
    Some(device_path.file_name()?.to_str()?.to_owned())
}

/// Returns the first CPU in the effective affinity of an interrupt, or `None` if it cannot be read.
fn first_affinity_cpu(irq_number: u32) -> Option<usize> {
    let cpu_list = fs::read_to_string(format!("/proc/irq/{irq_number}/effective_affinity_list")).ok()?;
    cpu_list.trim().split([',', '-']).next()?.parse().ok()
}

/// Returns the interrupt number of each receive queue, from the text of /proc/interrupts. Drivers name interrupts
/// `eth0-TxRx-3`, `i40e-eth0-TxRx-3`, `virtio2-input.3`, `mlx5_comp3@pci:0000:3b:00.0`, `eth0-rx-3` or `eth0-Tx-Rx-3`.
fn irqs_by_receive_queue(interrupts: &str, interface: &str, bus_device: &str) -> BTreeMap<u16, u32> {
    let belongs_to_interface = |action: &str| {
        let action_contains_name = |name: &str| {
            action.split(['-', '@']).any(|name_part| name_part == name || name_part.ends_with(&format!(":{name}")))
        };
        action_contains_name(interface)
            || action_contains_name(bus_device)
            || action.ends_with(&format!("pci:{bus_device}"))
    };
    let mut irq_by_queue = BTreeMap::new();
    for line in interrupts.lines() {
        let mut columns = line.split_whitespace();
        let irq_number = columns.next().and_then(|irq_token| irq_token.strip_suffix(':')?.parse().ok());
        let (Some(irq), Some(action)) = (irq_number, columns.last()) else { continue };
        if let Some(queue) = parse_receive_queue(action)
            && belongs_to_interface(action)
        {
            irq_by_queue.insert(queue, irq);
        }
    }
    irq_by_queue
}

fn parse_receive_queue(action: &str) -> Option<u16> {
    let lowercase_name = action.split('@').next()?.to_lowercase();
    let name_without_number = lowercase_name.trim_end_matches(|c: char| c.is_ascii_digit());
    let is_receive_interrupt = ["rx-", "rx", "input.", "comp"].iter().any(|end| name_without_number.ends_with(end));
    if is_receive_interrupt { lowercase_name[name_without_number.len()..].parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_irqs(lines: &[&str], interface: &str, device: &str) -> Vec<(u16, u32)> {
        let header = "           CPU0       CPU1\n".to_owned();
        let interrupts_line =
            |(irq, action): (usize, &&str)| format!(" {}:  0  7 PCI-MSIX-0000:00:03.0 {irq}-edge {action}\n", irq + 30);
        let text = header + &lines.iter().enumerate().map(interrupts_line).collect::<String>();
        irqs_by_receive_queue(&text, interface, device).into_iter().collect()
    }

    #[test]
    fn receive_queue_interrupts_are_found_for_common_drivers() {
        let virtio_actions =
            ["virtio2-config", "virtio2-input.0", "virtio2-output.0", "virtio2-input.1", "virtio20-input.0"];
        assert_eq!(parse_irqs(&virtio_actions, "eth0", "virtio2"), [(0, 31), (1, 33)]);
        let igb_actions = ["eth0", "eth0-TxRx-0", "eth0-TxRx-1", "eth1-TxRx-0"];
        assert_eq!(parse_irqs(&igb_actions, "eth0", "0000:00:03.0"), [(0, 31), (1, 32)]);
        let ice_actions = ["ice-eth0-TxRx-0", "ice-eth0-TxRx-11"];
        assert_eq!(parse_irqs(&ice_actions, "eth0", "0000:00:03.0"), [(0, 30), (11, 31)]);
        let mlx5_actions =
            ["mlx5_async0@pci:0000:3b:00.0", "mlx5_comp0@pci:0000:3b:00.0", "mlx5_comp1@pci:0000:3b:00.1"];
        assert_eq!(parse_irqs(&mlx5_actions, "eth0", "0000:3b:00.0"), [(0, 31)]);
        let separate_tx_actions = ["eth0-rx-0", "eth0-tx-0", "eth0-Tx-Rx-1"];
        assert_eq!(parse_irqs(&separate_tx_actions, "eth0", "0000:00:03.0"), [(0, 30), (1, 32)]);
    }

    #[test]
    fn queues_of_virtual_devices_are_assigned_cpus_round_robin() {
        let cpu_count = std::thread::available_parallelism().map_or(1, usize::from);
        assert_eq!(cpus_of_queues("nonexistent0", 4), (0..4).map(|queue| queue % cpu_count).collect::<Vec<_>>());
    }
}
