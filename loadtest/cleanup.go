package loadtest

import (
	"cmp"
	"context"
	"fmt"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
)

// deletesEach is how many keys one transaction of the clean-up deletes. etcd takes 128 by default.
const deletesEach = 100

// cleanup deletes all keys of the run's key space, and no other ones. It returns the number of those that were there.
func cleanup(ctx context.Context, cfg *Config, kvs []kv, space *keySpace) (int64, error) {
	pages := int((space.count + deletesEach - 1) / deletesEach)
	deleted, wrong := make([]int64, pages), make([]error, pages)
	eachOf(pages, func(page int) {
		first := uint64(page) * deletesEach
		txn := &etcdserverpb.TxnRequest{}
		for i := first; i < min(first+deletesEach, space.count); i++ {
			txn.Success = append(txn.Success, &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestDeleteRange{
				RequestDeleteRange: &etcdserverpb.DeleteRangeRequest{Key: space.appendKey(nil, i)},
			}})
		}
		ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
		defer cancel()
		answer, err := kvs[page%len(kvs)].Txn(ctx, txn)
		if err != nil {
			wrong[page] = err
			return
		}
		for _, r := range answer.Responses {
			deleted[page] += r.GetResponseDeleteRange().GetDeleted()
		}
	})
	var all int64
	var err error
	for page, n := range deleted {
		all += n
		err = cmp.Or(err, wrong[page])
	}
	if err != nil {
		return all, fmt.Errorf("clean up: of %d keys %d were found and deleted: %w", space.count, all, err)
	}
	return all, nil
}
