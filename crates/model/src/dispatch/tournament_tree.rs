//! Tournament tree, which has the minimum of many counters at all times.

/// Tournament tree that finds the core with the least key. The minimum takes constant time, and a changed key takes
/// log2(cores) steps. Turbo's comparator tree (HPCA'23, Sect. V-A) and RingLeader's reduction tree (NSDI'23, Sect. 5.1)
/// work alike.
#[derive(Debug, Clone)]
pub struct TournamentTree<K: TournamentKey> {
    /// Node i has the children 2i and 2i+1, and the leaves are the last half. A node holds a key and, in lower bits,
    /// the index of its leaf. So one comparison orders both, and among equal keys the lowest index wins.
    nodes: Vec<K::Node>,
    leaf_count: usize,
}

/// Key of a leaf, which can be packed into a node together with the leaf's index.
pub trait TournamentKey: Copy {
    /// Unsigned integer that holds a key and, in lower bits, the index of a leaf.
    type Node: Copy + Ord + std::fmt::Debug;
    /// Node greater than all others, which is used for missing leaves.
    const NO_LEAF: Self::Node;

    /// Returns a key and the index of its leaf, packed into one number.
    fn pack_node(self, leaf_index: u16) -> Self::Node;
    /// Returns the index of the leaf and the key that a node holds.
    fn unpack_node(node: Self::Node) -> (u16, Self);
}

macro_rules! key {
    ($key:ty, $node:ty) => {
        impl TournamentKey for $key {
            type Node = $node;
            const NO_LEAF: $node = <$node>::MAX;

            #[inline]
            fn pack_node(self, leaf_index: u16) -> $node {
                <$node>::from(self) << u16::BITS | <$node>::from(leaf_index)
            }

            #[inline]
            fn unpack_node(node: $node) -> (u16, $key) {
                (node as u16, (node >> u16::BITS) as $key)
            }
        }
    };
}

key!(u32, u64);
key!(u64, u128);

impl<K: TournamentKey> TournamentTree<K> {
    /// Returns a tree of `leaves` leaves (at least 1), all of which have the key `key`.
    pub fn new(leaves: u16, key: K) -> Self {
        assert!(leaves > 0, "a tournament without players");
        let leaf_count = usize::from(leaves).next_power_of_two();
        let mut tree = Self { nodes: vec![K::NO_LEAF; 2 * leaf_count], leaf_count };
        for index in 0..leaves {
            tree.set_key(index, key);
        }
        tree
    }

    /// Sets the key of the leaf with index `index`.
    #[inline]
    pub fn set_key(&mut self, index: u16, key: K) {
        let mut node = self.leaf_count + usize::from(index);
        let mut least_node = key.pack_node(index);
        self.nodes[node] = least_node;
        while node > 1 {
            least_node = least_node.min(self.nodes[node ^ 1]);
            node >>= 1;
            self.nodes[node] = least_node;
        }
    }

    /// Returns the key of the leaf with index `index`.
    #[inline]
    pub fn leaf_key(&self, index: u16) -> K {
        K::unpack_node(self.nodes[self.leaf_count + usize::from(index)]).1
    }

    /// Returns the index and the key of the leaf with the least key. Among equal keys, the lowest index wins.
    #[inline]
    pub fn least_leaf(&self) -> (u16, K) {
        K::unpack_node(self.nodes[1])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn least_leaf_matches_a_linear_search(
            leaves in 1u16..70,
            changes in prop::collection::vec((any::<u16>(), prop_oneof![0u64..4, any::<u64>()]), 0..200),
        ) {
            let mut tree = TournamentTree::<u64>::new(leaves, 1);
            let mut keys = vec![1u64; usize::from(leaves)];
            for (index, key) in changes {
                let index = index % leaves;
                tree.set_key(index, key);
                keys[usize::from(index)] = key;
                let least_leaf = (0..leaves).min_by_key(|i| keys[usize::from(*i)]).unwrap();
                prop_assert_eq!(tree.least_leaf(), (least_leaf, keys[usize::from(least_leaf)]));
                prop_assert_eq!(tree.leaf_key(index), key);
            }
        }
    }
}
