//! The least of many counters at all times.

/// A tournament over the cores: the least key in constant time, a changed key in log2(cores) steps. The same shape as
/// Turbo's comparator tree (HPCA'23, Sect. V-A) and RingLeader's reduction tree (NSDI'23, Sect. 5.1).
#[derive(Debug, Clone)]
pub struct LeastTree {
    /// Node i has the children 2i and 2i+1; the leaves are the last half. A node holds its key, and below it the index of
    /// the leaf that the key came from: one comparison settles both, and of equal keys the lowest index wins.
    nodes: Vec<u128>,
    leaves: usize,
}

/// Bits of a node that hold the leaf's index.
const INDEX_BITS: u32 = 16;

impl LeastTree {
    /// `leaves` keys (at least 1), each `key`.
    pub fn new(leaves: u16, key: u64) -> Self {
        assert!(leaves > 0, "a tournament without players");
        let width = usize::from(leaves).next_power_of_two();
        let mut tree = Self { nodes: vec![u128::MAX; 2 * width], leaves: width };
        for index in 0..leaves {
            tree.set(index, key);
        }
        tree
    }

    /// Changes the key of leaf `index`.
    #[inline]
    pub fn set(&mut self, index: u16, key: u64) {
        let mut node = self.leaves + usize::from(index);
        let mut least = u128::from(key) << INDEX_BITS | u128::from(index);
        self.nodes[node] = least;
        while node > 1 {
            least = least.min(self.nodes[node ^ 1]);
            node >>= 1;
            self.nodes[node] = least;
        }
    }

    /// The key of leaf `index`.
    #[inline]
    pub fn get(&self, index: u16) -> u64 {
        (self.nodes[self.leaves + usize::from(index)] >> INDEX_BITS) as u64
    }

    /// The leaf with the least key, the first of equals, and its key.
    #[inline]
    pub fn least(&self) -> (u16, u64) {
        let least = self.nodes[1];
        (least as u16, (least >> INDEX_BITS) as u64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_a_search(
            leaves in 1u16..70,
            changes in prop::collection::vec((any::<u16>(), prop_oneof![0u64..4, any::<u64>()]), 0..200),
        ) {
            let mut tree = LeastTree::new(leaves, 1);
            let mut keys = vec![1u64; usize::from(leaves)];
            for (index, key) in changes {
                let index = index % leaves;
                tree.set(index, key);
                keys[usize::from(index)] = key;
                let least = (0..leaves).min_by_key(|i| keys[usize::from(*i)]).unwrap();
                prop_assert_eq!(tree.least(), (least, keys[usize::from(least)]));
                prop_assert_eq!(tree.get(index), key);
            }
        }
    }
}
