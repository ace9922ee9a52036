//! The CPU that serves each receive queue: the CPU that gets the queue's interrupt.

use std::collections::BTreeMap;
use std::fs;

use crate::sysfs;

/// Returns the CPU of each of the `receive_queues` queues. Queues of virtual devices have no known interrupt: queue `q`
/// is attributed to CPU `q` modulo the number of CPUs.
pub fn cpus_of_queues(interface: &str, receive_queues: u16) -> Vec<usize> {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let interrupts = interrupts(interface);
    let cpu = |queue: u16| interrupts.get(&queue).and_then(|found| found.cpu).unwrap_or(usize::from(queue) % count);
    (0..receive_queues).map(cpu).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupt {
    /// Number of the interrupt (IRQ), as in /proc/interrupts.
    pub number: u32,
    /// CPU that handles the interrupt, or `None` if /proc does not show it.
    pub cpu: Option<usize>,
}

/// Returns the known interrupts of a device by receive queue; empty for a virtual device.
pub fn interrupts(interface: &str) -> BTreeMap<u16, Interrupt> {
    let vectors = device_name(interface).map_or_else(BTreeMap::new, |device| {
        irqs_by_receive_queue(&fs::read_to_string("/proc/interrupts").unwrap_or_default(), interface, &device)
    });
    vectors.into_iter().map(|(queue, number)| (queue, Interrupt { number, cpu: first_affinity_cpu(number) })).collect()
}

/// Returns the name of a network device on its bus, which is a PCI address or `virtioN`.
fn device_name(interface: &str) -> Option<String> {
    let device = fs::canonicalize(sysfs::device_directory(interface)?.join("device")).ok()?;
    Some(device.file_name()?.to_str()?.to_owned())
}

/// Returns the first CPU in the effective affinity of an interrupt.
fn first_affinity_cpu(irq: u32) -> Option<usize> {
    let list = fs::read_to_string(format!("/proc/irq/{irq}/effective_affinity_list")).ok()?;
    list.trim().split([',', '-']).next()?.parse().ok()
}

/// Returns the interrupt number of each receive queue, from the text of /proc/interrupts. Drivers name interrupts
/// `eth0-TxRx-3`, `i40e-eth0-TxRx-3`, `virtio2-input.3`, `mlx5_comp3@pci:0000:3b:00.0`, `eth0-rx-3` or `eth0-Tx-Rx-3`.
fn irqs_by_receive_queue(interrupts: &str, interface: &str, device: &str) -> BTreeMap<u16, u32> {
    let ours = |action: &str| {
        let is = |name: &str| action.split(['-', '@']).any(|part| part == name || part.ends_with(&format!(":{name}")));
        is(interface) || is(device) || action.ends_with(&format!("pci:{device}"))
    };
    let mut vectors = BTreeMap::new();
    for line in interrupts.lines() {
        let mut words = line.split_whitespace();
        let irq = words.next().and_then(|word| word.strip_suffix(':')?.parse().ok());
        let (Some(irq), Some(action)) = (irq, words.last()) else { continue };
        if let Some(queue) = parse_receive_queue(action)
            && ours(action)
        {
            vectors.insert(queue, irq);
        }
    }
    vectors
}

fn parse_receive_queue(action: &str) -> Option<u16> {
    let name = action.split('@').next()?.to_lowercase();
    let head = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let receives = ["rx-", "rx", "input.", "comp"].iter().any(|end| head.ends_with(end));
    if receives { name[head.len()..].parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_irqs(lines: &[&str], interface: &str, device: &str) -> Vec<(u16, u32)> {
        let header = "           CPU0       CPU1\n".to_owned();
        let line =
            |(irq, action): (usize, &&str)| format!(" {}:  0  7 PCI-MSIX-0000:00:03.0 {irq}-edge {action}\n", irq + 30);
        let text = header + &lines.iter().enumerate().map(line).collect::<String>();
        irqs_by_receive_queue(&text, interface, device).into_iter().collect()
    }

    #[test]
    fn queue_interrupts_of_many_drivers_are_found() {
        let virtio = ["virtio2-config", "virtio2-input.0", "virtio2-output.0", "virtio2-input.1", "virtio20-input.0"];
        assert_eq!(parse_irqs(&virtio, "eth0", "virtio2"), [(0, 31), (1, 33)]);
        let igb = ["eth0", "eth0-TxRx-0", "eth0-TxRx-1", "eth1-TxRx-0"];
        assert_eq!(parse_irqs(&igb, "eth0", "0000:00:03.0"), [(0, 31), (1, 32)]);
        let ice = ["ice-eth0-TxRx-0", "ice-eth0-TxRx-11"];
        assert_eq!(parse_irqs(&ice, "eth0", "0000:00:03.0"), [(0, 30), (11, 31)]);
        let mlx5 = ["mlx5_async0@pci:0000:3b:00.0", "mlx5_comp0@pci:0000:3b:00.0", "mlx5_comp1@pci:0000:3b:00.1"];
        assert_eq!(parse_irqs(&mlx5, "eth0", "0000:3b:00.0"), [(0, 31)]);
        let separate = ["eth0-rx-0", "eth0-tx-0", "eth0-Tx-Rx-1"];
        assert_eq!(parse_irqs(&separate, "eth0", "0000:00:03.0"), [(0, 30), (1, 32)]);
    }

    #[test]
    fn queues_of_virtual_devices_get_cpus_in_turn() {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        assert_eq!(cpus_of_queues("nonexistent0", 4), (0..4).map(|queue| queue % count).collect::<Vec<_>>());
    }
}
