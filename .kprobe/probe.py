import torch
from tests.kernels.checks import *
from tests.kernels.dense import problem, answer, table_of
from longctx_patch.kernels import *
from longctx_patch.kernels.base import *
from tests.reference import relative_error as R
def one(name,n,layout,others=True,B=2,heads=(8,2)):
    k=available()[name]; g=problem(n,n,heads,torch.bfloat16,dim=64,device="cuda"); s=Segments((n,),(n,),CAUSAL_WINDOW)
    if not others: g=g._replace(other_k=g.other_k[:,:0],other_v=g.other_v[:,:0],sink_H=g.sink_H*0-1e4)
    w=answer(g,table_of(s),Score(.125)); out=w.out.to(g.q.dtype)
    if layout=="contig": out=out.contiguous()
    gr=k.backward(g.dout,g.q,g.k,g.v,out,w.lse.float(),s,Score(.125))
    print(name,n,layout,others,heads,out.stride(),w.lse.stride(),["%.4f"%R(a,b) for a,b in zip(gr,w[4:])],flush=True)
for name in ("cudnn","torch_flash"):
    for n in (256,257,300):
        for lay in ("asis","contig"):
            one(name,n,lay)
    one(name,257,"contig",False); one(name,257,"contig",True,2,(8,8)); one(name,129,"contig"); one(name,65,"contig"); one(name,193,"contig")
